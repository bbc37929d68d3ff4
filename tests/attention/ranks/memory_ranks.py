"""What the process of test_attention_memory.py runs: forward and backward of each mask at a length that no matrix of scores fits."""

from __future__ import annotations

import torch

from benchmarks.instruments.resident import peak_growth
from lightning_sp.attention import AttentionMask, sequence_parallel_attention
from tests.attention.ranks.attention_ranks import Case
from tests.drawn_cases import masks
from tests.mask_table import ROWS

LENGTH = 32 * 1024


def peak_bytes(name: str) -> int:
    """Return by how much resident memory rises over a step, what is given whole apart."""
    row = ROWS[name]
    factor = LENGTH // 32
    mask = {key: _stretched(value, factor) for key, value in row.mask.items()}
    keys = row.options.get("keys")
    options = {**row.options, "keys": keys * factor if keys else None}
    # A mask given as a matrix is one: here of keys alone, so that what is measured is what the attention adds.
    dense = mask.pop("dense", None)
    case = Case(heads=1, kv_heads=1, length=LENGTH, mask=mask, dtype=torch.float32, **options)
    tensors = [t[:1, :, :, :].repeat(1, 1, 1, 2) for t in case.tensors()]
    q, k, v = (t.requires_grad_(True) for t in tensors[:3])
    _, attention = case.options()
    if attention["dropout"] is not None:
        object.__setattr__(attention["dropout"], "samples", None)
    if attention["bias"] is not None:
        attention["bias"] = attention["bias"][:1].detach().requires_grad_(True)
    whole = masks.build(mask, LENGTH, LENGTH, *((case.keys, case.keys) if case.keys else ()))
    whole = masks.of_one_row(whole, 0)
    if dense is not None:
        seen = torch.rand(1, 1, 1, k.shape[2]) < 0.5
        whole = AttentionMask(
            whole.causal, whole.boundaries, whole.window_size, valid=whole.valid, dense=seen, mask_mod=whole.mask_mod
        )
    with peak_growth() as growth:
        out = sequence_parallel_attention(q, k, v, mesh=None, mask=whole, **attention)
        out.backward(tensors[3])
    return growth.peak_bytes


def _stretched(value: object, factor: int) -> object:
    """Scale what is counted in tokens."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return value * factor
    if isinstance(value, (list, tuple)):
        return type(value)(_stretched(each, factor) for each in value)
    raise TypeError(value)
