"""A layer that its module casts in its forward is cast before it is sharded; where the source does not say so it is refused by name."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp.parameter_dtypes import (
    cast_as_in_forward,
    refuse_changed_dtypes,
    units_of_another_dtype,
)
from lightning_sp.parallelize.fsdp.shard_model import shard_model
from lightning_sp.testing import max_error
from tests.trainer.tiny import plain_trainer, quiet_trainer


class Router(nn.Module):
    """As of Switch Transformers: its classifier is float32, whatever the model is."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.classifier, self.dtype = nn.Linear(4, 2), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier.to(self.dtype)(x.to(self.dtype)).to(x)


def forward(dtype: torch.dtype) -> str:
    model = nn.Sequential(nn.Linear(4, 4), Router(dtype)).double()
    fully_shard(model[1], mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    refuse_changed_dtypes(model)
    try:
        for _ in range(2):
            model(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
    except SequenceParallelError as error:
        return str(error)
    return ""


def test_a_parameter_that_its_module_casts_is_refused(pools):
    for said in pools(2).run(forward, torch.float32):
        assert (
            "1.classifier.weight is torch.float64, and the model makes it torch.float32 in its forward (2 such in 1)"
            in said
        )
        assert "precision='32-true'" in said
        assert "config.router_dtype" in said


def test_one_of_the_same_dtype_is_not(pools):
    assert pools(2).run(forward, torch.float64) == ["", ""]


class Assigning(Router):
    """As Switch Transformers writes it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.classifier = self.classifier.to(self.dtype)
        return self.classifier(x.to(self.dtype)).softmax(-1).to(x.dtype)


def three_steps(dtype: torch.dtype, sharded: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Assigning(torch.float32), nn.Linear(2, 1)).to(dtype)
    if sharded:
        cast_as_in_forward(model)
        shard_model(model, [], init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.linspace(-1, 1 + step, 12, dtype=dtype).view(3, 4)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = {f"{n} of AdamW": optimizer.state[p]["exp_avg_sq"] for n, p in model.named_parameters()}
    found = {**dict(model.named_parameters()), **states}
    return {name: (t.full_tensor() if sharded else t).detach() for name, t in found.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_layer_that_is_cast_by_assignment_trains_as_on_one_device(pools, dtype):
    expected = three_steps(dtype, False)
    assert expected["1.classifier.weight"].dtype == torch.float32
    assert expected["0.weight"].dtype == dtype
    for found in pools(2).run(three_steps, dtype, True):
        for name, each in expected.items():
            assert found[name].dtype == each.dtype, name
            assert max_error(found[name], each) < (1e-12 if dtype == torch.float64 else 1e-2), name


class Routed(pl.LightningModule):
    """Weights each token by one that casts its classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router, self.head = nn.Embedding(16, 4), Assigning(torch.float32), nn.Linear(4, 16)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = self.embedding(batch["input_ids"])
        heads = x.unsqueeze(1)
        x = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).squeeze(1)
        logits = self.head(x * self.router(x)[..., :1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fitted(world: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = Routed()
    rows = [{"input_ids": (torch.arange(16) * (1 + row)) % 16} for row in range(6)]
    trainer = plain_trainer(max_epochs=1) if world == 1 else quiet_trainer(world)
    trainer.fit(module, DataLoader(rows, batch_size=2))
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in module.named_parameters()}


def test_a_trial_leaves_a_layer_to_be_cast_in_its_forward(pools):
    expected = fitted(1)
    for found in pools(2).run(fitted, 2):
        assert all(max_error(found[name], each) < 1e-6 for name, each in expected.items())


def test_layers_of_the_rarer_dtype_are_units_of_their_own():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.LayerNorm(4).double(), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4).double())
    )
    assert units_of_another_dtype(model, []) == [model[2][1], model[1]]
    assert units_of_another_dtype(model, [model[2]]) == [model[1], model[2][1]]
    for parameter in (*model[1].parameters(), *model[2][1].parameters()):
        parameter.requires_grad_(False)
    assert (
        units_of_another_dtype(model, []) == []
    )  # what is frozen is gathered in its own dtype, and adds up no gradients


def test_a_module_with_weights_of_two_dtypes_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(
        SequenceParallelError, match=r"^1 trains weights of torch.bfloat16 and torch.float32 in one unit"
    ) as refused:
        units_of_another_dtype(model, [])
    assert "weight torch.float32, bias torch.float32, scale torch.bfloat16" in str(refused.value)


class WideNorm(nn.LayerNorm):
    """A norm in float64, whatever comes in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.double()).to(x.dtype)


def steps_with_wide_norms(sharded: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), WideNorm(4).double(), nn.Sequential(WideNorm(4).double(), nn.Linear(4, 2)))
    if sharded:
        shard_model(model, [model[2]], init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.linspace(-1, 1 + step, 12).view(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: (p.full_tensor() if sharded else p).detach() for n, p in model.named_parameters()}


def test_norms_of_another_dtype_train_as_on_one_device(pools):
    expected = steps_with_wide_norms(False)
    for found in pools(2).run(steps_with_wide_norms, True):
        for name, each in expected.items():
            assert found[name].dtype == each.dtype, name
            assert max_error(found[name], each) < 1e-5, name
