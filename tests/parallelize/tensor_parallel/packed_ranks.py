"""A layer for several things on each rank: its share of each, and what it keeps, importable by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader

from lightning_sp import comm
from lightning_sp.parallelize.tensor_parallel.packed import packed_linear
from lightning_sp.parallelize.tensor_parallel.packed_trial import share
from lightning_sp.testing import max_error
from tests.parallelize.tensor_parallel.tensor_parallel_ranks import HuggingFace
from tests.parallelize.tensor_parallel.vocabulary_ranks import Measured
from tests.trainer.tiny import TokenDataset, quiet_trainer

PARTS = ((24, 8, 8), (20, 20), (8, 4, 4, 12))


class Transposed(nn.Module):
    """A weight whose inputs come first."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)


def errors(size: int) -> dict[str, float]:
    """Return how far outputs, gradients and what is exchanged are from those of whole weights, and how many copies are kept."""
    found: dict[str, float] = {}
    for parts in PARTS:
        for outputs in (0, 1):
            for dtype in (torch.float64, torch.bfloat16):
                found |= {f"{parts} {outputs} {dtype} {k}": v for k, v in _errors(parts, outputs, dtype, size).items()}
    return found


def _errors(parts: tuple[int, ...], outputs: int, dtype: torch.dtype, size: int) -> dict[str, float]:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    torch.manual_seed(4)
    with_autocast = dtype == torch.bfloat16
    of = torch.float32 if with_autocast else dtype
    number, rows = sum(parts), share(parts, rank, size)
    weight, bias, x = torch.randn(number, 6, dtype=of), torch.randn(number, dtype=of), torch.randn(3, 5, 6, dtype=of)
    gradient = torch.randn(3, 5, number, dtype=of)[..., rows]
    in_order = slice(rank * number // size, (rank + 1) * number // size)

    whole = [each.clone().requires_grad_() for each in (x, weight, bias)]
    own = weight[in_order].clone()
    layer = Transposed(own if outputs == 0 else own.T.contiguous(), bias[in_order].clone())
    mine = x.clone().requires_grad_()
    kept: list[Tensor] = []
    with torch.autocast("cpu", torch.bfloat16, enabled=with_autocast):
        expected = F.linear(whole[0], whole[1][rows], whole[2][rows])
        with saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):  # type: ignore[func-returns-value]
            actual = packed_linear(layer, outputs, parts, group, mine)
    assert actual.dtype == expected.dtype == dtype
    expected.backward(gradient.to(dtype))
    actual.backward(gradient.to(dtype))

    def grad_in_order(each: Tensor) -> Tensor:
        assert each.grad is not None
        return comm.reduce_sum(each.grad.clone(), group)[in_order]

    of_weight, of_bias = layer.weight.grad, layer.bias.grad  # type: ignore[union-attr]
    assert of_weight is not None
    assert of_bias is not None
    assert of_weight.dtype == of_bias.dtype == of
    own_storages = {each.untyped_storage().data_ptr() for each in (mine, layer.weight)}
    copies = sum(each.untyped_storage().data_ptr() not in own_storages for each in kept)
    return {
        "output": max_error(actual.double(), expected.double()),
        "x": max_error(mine.grad, whole[0].grad),
        "weight": max_error(of_weight if outputs == 0 else of_weight.T, grad_in_order(whole[1])),
        "bias": max_error(of_bias, grad_in_order(whole[2])),
        # Autocast rounds the input, as it does for any linear layer.
        "copies": float(copies - with_autocast),
    }


# Hugging Face's own plan of Phi-3.
GATHERED = {
    "self_attn.qkv_proj": "colwise_gather_output",
    "self_attn.o_proj": "rowwise_split_input",
    "mlp.gate_up_proj": "colwise_gather_output",
    "mlp.down_proj": "rowwise_split_input",
    "embed_tokens": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
}


def peaks(world: int, strategies: list[dict[str, Any]], length: int, **sizes: Any) -> list[int]:
    """Return the live bytes of tensors at the peak of a step of Phi-3 on one row, in float32, by each strategy."""
    found = []
    for strategy in strategies:
        torch.manual_seed(3)
        module = Measured()
        module.build = partial(HuggingFace, "phi3", vocab_size=62, **{"max_position_embeddings": length, **sizes})
        trainer = quiet_trainer(world, strategy=strategy, max_epochs=1, precision="32-true")
        trainer.fit(module, DataLoader(TokenDataset(2, length=length), batch_size=1))
        found.append(module.found["peak"])
    return found
