"""What each rank runs in test_fit.py and its siblings: importable by name in the spawned ranks; returns plain values."""

from __future__ import annotations

import traceback
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torchmetrics import MeanMetric
from torchmetrics.text import Perplexity

from lightning_sp import SequenceLayout, SequenceParallelError, shard_batch
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.layout import shard
from lightning_sp.models import Llama
from tests.trainer.tiny import Plain, TokenDataset, _full, fit, quiet_trainer, tiny_gpt, tiny_llama


def fits(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run several fits in one call."""
    return [fit(**case) for case in cases]


def refusal(function: str, *args: Any) -> str:
    """Return the message of the SequenceParallelError that a scenario ends in."""
    try:
        globals()[function](*args)
    except SequenceParallelError as error:
        return str(error)
    except BaseException as error:
        return f"NOT REFUSED BY NAME: {traceback.format_exc()}{error}"
    return "NOT REFUSED"


class Evaluated(Plain):
    """Logs a validation loss, by a number and by token metrics, and collects predictions."""

    def __init__(self, build: Any) -> None:
        super().__init__(build)
        self.mean = MeanMetric()

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "perplexity"):
            self.perplexity = Perplexity(ignore_index=-100)  # on the meta device on ranks other than 0

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())
        self.log("val_loss", loss, on_epoch=True, batch_size=len(batch["input_ids"]), sync_dist=True)
        self.mean.update(loss, weight=batch["shift_labels"].ne(-100).sum())
        self.perplexity.update(self.logits(batch), batch["shift_labels"])
        self.log("mean", self.mean)
        self.log("perplexity", self.perplexity)

    test_step = validation_step

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
        return {"tokens": batch["input_ids"], "best": self.logits(batch).argmax(-1)}


def evaluate(world: int, strategy: dict[str, Any], samples: int, length: int, micro: int) -> dict[str, Any]:
    """Validate and predict with an untrained model."""
    torch.manual_seed(3)
    module = Evaluated(tiny_llama)
    trainer = quiet_trainer(world, strategy=strategy)
    data = TokenDataset(samples, length)
    metrics = trainer.validate(module, DataLoader(data, batch_size=micro), verbose=False)
    predictions = trainer.predict(module, DataLoader(data, batch_size=micro))
    assert predictions is not None
    return {
        "metrics": metrics,
        "tokens": torch.cat([p["tokens"] for p in predictions]),
        "best": torch.cat([p["best"] for p in predictions]),
        "whole": data.tokens[:, :-1],
    }


class Predicting(Plain):
    """Predicts what the sequence as a whole has, by choice from the whole or, wrongly, from this rank's part."""

    def __init__(self, kind: str) -> None:
        super().__init__(tiny_llama)
        self.kind = kind

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
        logits = self.logits(batch)
        whole = self.trainer.strategy.unshard(logits)
        if self.kind == "whole":
            return {
                # As wide as a part has tokens.
                "pooled": whole.mean(1)[:, :16],
                "rows": torch.tensor(len(logits)),
                "whole": whole,
                "last": whole[:, -1].argmax(-1),
                "constant": torch.ones_like(batch["input_ids"]),
                "logits": logits,
            }
        wrong = {"last": logits[:, -1].sum(-1), "flat": logits.flatten(0, 1), "number": logits.sum()}
        return {"logits": logits, self.kind: wrong[self.kind]}


def predict(world: int, strategy: dict[str, Any], kind: str) -> Any:
    """Predict with an untrained model: of each name the batches' tensors, or the refusal."""
    torch.manual_seed(3)
    trainer = quiet_trainer(world, strategy=strategy)
    try:
        found = trainer.predict(Predicting(kind), DataLoader(TokenDataset(4, 32), batch_size=2))
    except SequenceParallelError as refusal:
        return str(refusal)
    assert found is not None
    return {name: [batch[name] for batch in found] for name in found[0]}


def initial_weights(world: int, strategy: dict[str, Any], seed_per_rank: bool, eager: bool) -> dict[str, Any]:
    """Return the weights before any step, as every rank gathers them."""
    torch.manual_seed(11 + (dist.get_rank() if seed_per_rank else 0))
    module = Plain(partial(tiny_gpt, num_layers=2))
    if eager:
        module.configure_model()
    seen: dict[str, Any] = {}

    def on_fit_start() -> None:
        for name, p in module.named_parameters():
            seen[name] = p.full_tensor().detach().clone() if hasattr(p, "full_tensor") else p.detach().clone()

    module.on_train_start = on_fit_start  # type: ignore[method-assign]
    trainer = quiet_trainer(world, strategy=strategy, max_steps=1)
    trainer.fit(module, DataLoader(TokenDataset(2), batch_size=2))
    return seen


class Stream(IterableDataset):
    """A shuffled stream that every rank would read differently; unequal lengths per data-parallel group."""

    def __init__(self, sizes: list[int], strategy: Any = None) -> None:
        self.sizes, self.strategy = sizes, strategy

    def __iter__(self):
        data = TokenDataset(16)
        group = self.strategy().data_parallel_rank
        first = sum(self.sizes[:group])
        order = list(range(first, first + self.sizes[group]))
        # Unseeded on purpose: peers would differ if each read for itself.
        for index in torch.tensor(order)[
            torch.randperm(len(order), generator=torch.Generator().manual_seed(dist.get_rank()))
        ].tolist():
            yield data[index]


def stream(world: int, strategy: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """Fit on an iterable dataset and return the global token means it trained on."""
    torch.manual_seed(3)
    module = Plain(tiny_llama)
    trainer = quiet_trainer(world, strategy={"preflight": False, **strategy})
    trainer.fit(module, DataLoader(Stream(sizes, lambda: trainer.strategy), batch_size=1))
    return {"losses": module.losses, "steps": trainer.global_step}


def precision(world: int, strategy: dict[str, Any], name: str) -> dict[str, Any]:
    """Fit two steps in a precision and return the dtypes seen."""
    torch.manual_seed(3)
    module = Plain(tiny_llama)
    trainer = quiet_trainer(world, strategy=strategy, precision=name, max_steps=2)
    trainer.fit(module, DataLoader(TokenDataset(4), batch_size=2))
    optimizer = trainer.optimizers[0]
    return {
        "losses": module.losses,
        "parameters": {str(p.dtype) for p in module.parameters()},
        "grads": {str(g.dtype) for g in module.raw_grads[0].values()},
        "optimizer": {
            str(v.dtype) for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.dim()
        },
    }


def validate_then_fit_under_inference_mode(world: int) -> int:
    """Force the branch that Lightning takes on NCCL: validate, then fit the same module."""
    import lightning.pytorch.loops.utilities as loops

    original = loops.dist
    # Only the loops' question is answered so.
    loops.dist = SimpleNamespace(**{**vars(original), "get_backend": lambda *args: "nccl"})
    try:
        module = Evaluated(tiny_llama)
        trainer = quiet_trainer(world, num_sanity_val_steps=2, max_steps=2)
        data = DataLoader(TokenDataset(4), batch_size=2)
        used = []
        module.on_validation_batch_start = lambda *a: used.append(torch.is_inference_mode_enabled())  # type: ignore[method-assign]
        trainer.validate(module, data, verbose=False)
        assert used
        trainer.fit(module, data, data)
        assert not any(used)
        return trainer.global_step
    finally:
        loops.dist = original


def sharded_by_the_loader(world: int, size: int, stream: bool, how: str) -> dict[str, Any]:
    """Fit on whole batches, on those that the collate function has sharded and marked, or on those it has cut by hand."""
    layout = SequenceLayout(ring_size=world)

    def marked(rows: list[Any]) -> Any:
        return shard_batch(default_collate(rows), layout, dist.get_rank(), ShardOptions())[0]

    def by_hand(rows: list[Any]) -> Any:
        return {n: shard(t, layout, dist.get_rank(), dim=1) for n, t in default_collate(rows).items()}

    collate = {"whole": default_collate, "marked": marked, "by hand": by_hand, "by hand, uneven": by_hand}[how]
    data: Any = TokenDataset(size - (how == "by hand, uneven" and dist.get_rank() == 1) * 2)
    if stream:
        data = Rows(data)
    torch.manual_seed(3)
    module = Plain(tiny_gpt)
    strategy = {"ring_size": world, "preflight": False, "shard_batch": not how.startswith("by hand")}
    try:
        quiet_trainer(world, strategy=strategy).fit(module, DataLoader(data, batch_size=2, collate_fn=collate))
    except SequenceParallelError as error:
        return {"error": str(error)}
    weights = {n: _full(p.detach()).clone() for n, p in module.named_parameters()}
    return {"error": "", "losses": module.losses, "grads": module.raw_grads, "weights": weights}


class Rows(IterableDataset):
    """The samples of a map-style dataset as a stream."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self):
        return (self.data[i] for i in range(len(self.data)))


class NoAttention(nn.Module):
    """Mixes no tokens through anything that could be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, 16), nn.Linear(16, 61)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(input_ids))


def moved_positions(length: int, how: str) -> torch.Tensor:
    """Positions that do not rise by one in their middle: another document's start, or a jump ahead (PoSE, arXiv:2309.10400)."""
    half = length // 2
    return torch.cat([torch.arange(half), torch.arange(half) + (0 if how == "restarting" else half + 100)])


def fit_with(world: int, strategy: dict[str, Any], change: str) -> None:
    """Fit something that must be refused."""
    torch.manual_seed(3)
    module = Plain(NoAttention if change == "no attention" else tiny_llama)
    data: Any = TokenDataset(4)
    options: dict[str, Any] = {}
    if change == "no sequence":
        data = [{"values": torch.zeros(1)} for _ in range(4)]
    if change == "unnamed sequence":
        data = [{**TokenDataset(4)[i], "mystery": torch.zeros(32)} for i in range(4)]
        strategy = {**strategy, "preflight": False}
    if change == "labels":
        data = [
            {"input_ids": TokenDataset(4)[i]["input_ids"], "labels": TokenDataset(4)[i]["input_ids"]} for i in range(4)
        ]
    if change == "mask of pairs":
        data = [{**TokenDataset(4)[i], "attention_mask": torch.ones(32, 8)} for i in range(4)]
    if change in ("restarting positions", "jumping positions"):
        positions = moved_positions(32, change.split()[0])
        data = [{**TokenDataset(4)[i], "position_ids": positions} for i in range(4)]
    if change == "fp16":
        options["precision"] = "16-true"
    if change == "one rank fails" and dist.get_rank() == 1:
        data = [{"values": torch.zeros(1)} for _ in range(4)]
    if change == "different samples":
        data = [
            {**TokenDataset(4)[i], "input_ids": (TokenDataset(4)[i]["input_ids"] + dist.get_rank()) % 61}
            for i in range(4)
        ]
    if change == "local mse":
        step = module.training_step

        def training_step(batch: Any, batch_idx: int) -> torch.Tensor:
            return step(batch, batch_idx) + 0.1 * module.logits(batch).square().mean()

        module.training_step = training_step  # type: ignore[method-assign]
        strategy = {**strategy, "preflight": False}
    if change == "mse alone":
        module.training_step = lambda batch, batch_idx: module.logits(batch).square().mean()  # type: ignore[method-assign]
        strategy = {**strategy, "preflight": False}
    quiet_trainer(world, strategy=strategy, **options).fit(module, DataLoader(data, batch_size=2))


def checkpointed_calls(world: int, strategy: dict[str, Any], enabled: bool) -> dict[str, Any]:
    """Count kernel calls and collectives of one step, with and without activation checkpointing."""
    from lightning_sp import comm
    from lightning_sp.attention.kernels import torch_flash

    counts = {"kernel": 0, "exchange": 0, "transfer": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    import lightning_sp.attention.schemes.network as network_hops
    import lightning_sp.attention.schemes.ulysses as ulysses

    saved = torch_flash.TorchCpuKernel.forward, ulysses.exchange, network_hops.Transfer
    torch_flash.TorchCpuKernel.forward = counted("kernel", saved[0])
    ulysses.exchange, network_hops.Transfer = counted("exchange", saved[1]), counted("transfer", saved[2])
    try:
        result = fit(
            "llama",
            world,
            {**strategy, "activation_checkpointing": enabled, "preflight": False},
            {"size": 2},
            max_steps=1,
        )
    finally:
        torch_flash.TorchCpuKernel.forward, ulysses.exchange, network_hops.Transfer = saved
    assert comm is not None
    assert Llama is not None
    return {**counts, "grads": result["grads"]}


def compiled_fits(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run several fits and count what torch.compile made of each."""
    from torch._dynamo.utils import counters

    answers = []
    for case in cases:
        torch.compiler.reset()
        counters.clear()
        answer = fit(**case)
        answer["graphs"] = counters["stats"]["unique_graphs"]
        answer["graph_breaks"] = dict(counters["graph_break"])
        answers.append(answer)
    return answers
