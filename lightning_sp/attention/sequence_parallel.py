"""The one entry to the attention, for every caller: local q, k, v and a mask as a value."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_sp import comm
from lightning_sp.attention.kernel import check_kernel
from lightning_sp.attention.mask import AttentionMask
from lightning_sp.attention.operator import attention_op
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout
from lightning_sp.mesh import SequenceMesh


def sequence_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: SequenceMesh | None,
    mask: AttentionMask,
    layout: SequenceLayout | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Attend over whole sequences of which every rank holds a part, exactly as one device would.

    Args:
        q: this rank's queries.
        k: this rank's keys, with their own number of heads (GQA, MQA).
        v: this rank's values.
        mesh: the attention's mesh; None for one process.
        mask: what a query may see, in global positions.
        layout: which tokens each rank holds; None for the mesh's own, zigzag.
        scale: factor of q k^T; None for 1 / sqrt(D).
        sinks: score of each query head's sink, the same on all ranks; its gradient on each is of that rank's part, as a parameter's.
        softcap: bound of the scores before the mask, c tanh(score / c); None for none.
        kernel: "auto", "torch" or "flash_attn".

    Shapes: q (B, H, s, D), k (B, K, s, D), v (B, K, s, E), sinks (H,), H a multiple of K -> (B, H, s, E); s = S / (ring x ulysses), laid
    out by `layout`. Where E is not D the narrower ones travel and are computed padded with zeros.
    Communicates: see `ulysses` and `ring`; nothing on an axis of size 1.

    Raises:
        SequenceParallelError: shapes, dtypes, degrees or a kernel that cannot be served.

    Source: USP, arXiv:2405.07719, algorithm 1.
    """
    if torch.is_autocast_enabled(q.device.type):
        # As F.scaled_dot_product_attention under autocast: one dtype for all three (a float32 rotary embedding leaves v alone in bf16).
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))
    degrees = mesh.layout if mesh is not None else SequenceLayout()
    layout = degrees if layout is None else layout
    _check(q, k, v, sinks, softcap, degrees.ulysses_size)
    _check_layout(layout, degrees, q.shape[2])
    check_kernel(kernel, q.device.type, q.dtype, max(q.shape[3], v.shape[3]))
    mask.check(length=q.shape[2] * degrees.size, batch=q.shape[0])
    ring = comm.group_name(mesh.ring_group) if mesh is not None else ""
    ulysses = comm.group_name(mesh.ulysses_group) if mesh is not None else ""
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    width = v.shape[-1]
    dim = max(q.shape[-1], width)
    q, k, v = (F.pad(t, (0, dim - t.shape[-1])) if t.shape[-1] < dim else t for t in (q, k, v))
    out: Tensor
    options = (layout.table, sinks, float(softcap or 0.0), factor, ring, ulysses, kernel)
    out, _, _, _ = attention_op(q, k, v, *mask.arguments(), *options)
    return out[..., :width] if width < dim else out


def _check_layout(layout: SequenceLayout, degrees: SequenceLayout, tokens: int) -> None:
    given, held = ((each.ring_size, each.ulysses_size) for each in (layout, degrees))
    if given != held:
        raise SequenceParallelError(
            f"a layout of ring {given[0]} x ulysses {given[1]} on a mesh of ring {held[0]} x ulysses {held[1]}: they must be equal"
        )
    layout.check_length(tokens * degrees.size)


def _check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, softcap: float | None, ulysses_size: int) -> None:
    """Shapes are equal on all ranks, so all ranks raise together and no collective is needed."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise SequenceParallelError(f"{shapes}: must be (batch, heads, tokens, head dim)")
    if not (
        q.shape[0] == k.shape[0] == v.shape[0] and q.shape[2] == k.shape[2] == v.shape[2] and k.shape[1] == v.shape[1]
    ):
        raise SequenceParallelError(
            f"{shapes}: batch and tokens must be equal and k, v have the same heads; cross attention and a key-value cache are not supported"
        )
    if q.shape[1] % k.shape[1]:
        raise SequenceParallelError(
            f"{shapes}: the {q.shape[1]} query heads must be a multiple of the {k.shape[1]} key-value heads"
        )
    if q.shape[3] != k.shape[3]:
        raise SequenceParallelError(f"{shapes}: the head dims of q and k must be equal")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise SequenceParallelError(
            f"{shapes}: sinks of shape {tuple(sinks.shape)}, must be one for each of {q.shape[1]} query heads"
        )
    if softcap is not None and not softcap > 0:
        raise SequenceParallelError(f"softcap={softcap}: must be above 0, or None")
    if not q.dtype == k.dtype == v.dtype:
        raise SequenceParallelError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: must be one dtype outside autocast")
    if ulysses_size > q.shape[1]:
        allowed = [d for d in range(1, ulysses_size + 1) if ulysses_size % d == 0 and d <= q.shape[1]]
        raise SequenceParallelError(
            f"ulysses_size={ulysses_size} exceeds the {q.shape[1]} query heads of this attention: a rank would hold no head; "
            f"use ulysses_size in {allowed} and ring for the rest"
        )
