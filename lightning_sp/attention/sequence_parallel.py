"""The one entry to the attention, for every caller: local q, k, v and a mask as a value."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from lightning_sp import comm
from lightning_sp.attention.kernels.select import check_kernel
from lightning_sp.attention.operator import attention_op
from lightning_sp.attention.spec.codec import AttentionSpec, encode
from lightning_sp.attention.spec.dropout import AttentionDropout
from lightning_sp.attention.spec.mask import AttentionMask, check_whole
from lightning_sp.attention.spec.score_mod import MaskMod, ScoreMod
from lightning_sp.attention.spec.scores import Scores
from lightning_sp.config import ATTENTION_OPTIONS, AttentionKeywords, AttentionOptions, check_stages
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout
from lightning_sp.mesh import SequenceMesh, check_ring_transport


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
    bias: Tensor | None = None,
    score_mod: ScoreMod | Callable[..., Tensor] | None = None,
    dropout: AttentionDropout | None = None,
    **options: Unpack[AttentionKeywords],
) -> Tensor:
    """Attend over whole sequences of which every rank holds a part, exactly as one device would.

    Args:
        k: this rank's keys, with their own number of heads (GQA, MQA), and in cross attention of another sequence with its own length.
        mask: what a query may see, in global positions.
        mesh: None for one process.
        layout: which tokens each rank holds; None for the mesh's own, zigzag. Keys of another length are always in zigzag.
        scale: factor of q k^T; None for 1 / sqrt(D).
        sinks: score of each query head's sink, the same on all ranks; its gradient on each is of that rank's part, as a parameter's.
        softcap: bound of the scores before the mask, c tanh(score / c); None for none.
        bias: added after the cap, whole on every rank, by global positions; beyond its S and T is padding. Its gradient is as the sinks'.
        score_mod: a function of score and position in FlexAttention's form, or `ScoreMod` with tensors that learn; after the bias.
        dropout: of the weights, the same at all degrees; None for none.
        options: kernel, ring_transport, ring_saves_kv, ring_method and ulysses_stages, the names and values of `config.AttentionOptions`.

    Shapes: q (B, H, s, D), k (B, K, t, D), v (B, K, t, E), sinks (H,), bias (B or 1, H or 1, S or 1, T), H a multiple of K -> (B, H, s, E);
    s = S / (ring x ulysses), t = T / (ring x ulysses), laid out by `layout`; t = s but in cross attention. Where E is not D the
    narrower ones travel and are computed padded with zeros.
    Communicates: see `ulysses` and `ring`; nothing on an axis of size 1.
    Source: USP, arXiv:2405.07719, algorithm 1.

    Raises:
        SequenceParallelError: shapes, dtypes, degrees, a kernel or a transport that cannot be served.
    """
    return attention_by(
        _whole_attention, q, k, v, mesh=mesh, mask=mask, layout=layout, scale=scale, sinks=sinks, softcap=softcap, bias=bias,
        score_mod=score_mod, dropout=dropout, **options,
    )  # fmt: skip


def _whole_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    out: Tensor
    out, *_ = attention_op(q, k, v, *encode(spec))
    return out


def attention_by(
    operator: Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: SequenceMesh | None,
    mask: AttentionMask,
    layout: SequenceLayout | None,
    scale: float | None,
    sinks: Tensor | None,
    softcap: float | None,
    bias: Tensor | None,
    score_mod: ScoreMod | Callable[..., Tensor] | None,
    dropout: AttentionDropout | None = None,
    **options: Unpack[AttentionKeywords],
) -> Tensor:
    """Return `sequence_parallel_attention`, computed by what stands for the operator. As that, in shapes and errors.

    Args:
        operator: is given q, k and v in one dtype and head dim, and all the rest as one value; returns out, (B, H, s, D).
    """
    q, k, v = _in_one_dtype(q, k, v)
    degrees = mesh.layout if mesh is not None else SequenceLayout()
    _check(q, k, v, sinks, softcap, degrees.ulysses_size)
    layout = _checked_layout(layout or degrees, degrees, q.shape[2])
    chosen = _checked_options(q, v, mesh, options)
    mask.check(**(sizes := _sizes(q, k, layout)))
    scores = _scores(mask, softcap, bias, score_mod, dropout, sizes)
    ring_group, ulysses_group = _group_names(mesh)
    spec = AttentionSpec(
        mask=mask, layout_table=layout.table, scores=scores, sinks=sinks, options=chosen, ring_group=ring_group,
        ulysses_group=ulysses_group, scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
    )  # fmt: skip
    width = v.shape[-1]
    q, k, v = _in_one_head_dim(q, k, v)
    out = operator(q, k, v, spec)
    return out[..., :width] if width < q.shape[-1] else out


def _group_names(mesh: SequenceMesh | None) -> tuple[str, str]:
    """Return the names of the ring's group and of Ulysses', empty without processes."""
    return ("", "") if mesh is None else (comm.group_name(mesh.ring_group), comm.group_name(mesh.ulysses_group))


def _checked_options(q: Tensor, v: Tensor, mesh: SequenceMesh | None, options: AttentionKeywords) -> AttentionOptions:
    if unknown := [name for name in options if name not in ATTENTION_OPTIONS]:
        raise TypeError(f"sequence_parallel_attention() got an unexpected keyword argument {unknown[0]!r}")
    chosen = AttentionOptions(**options)
    check_kernel(chosen.kernel, q.device.type, q.dtype, max(q.shape[3], v.shape[3]))
    check_ring_transport(chosen.ring_transport, mesh)
    check_stages(chosen.ulysses_stages, q.shape[1], 1 if mesh is None else mesh.layout.ulysses_size)
    return chosen


def _in_one_head_dim(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the narrower ones with zeros, and lay the numbers of a head one after the other."""
    dim = max(q.shape[-1], v.shape[-1])
    q, k, v = (F.pad(t, (0, dim - t.shape[-1])) if t.shape[-1] < dim else t for t in (q, k, v))
    # The fused kernels read a head's numbers one after the other whatever the stride says: channels before tokens would be silently wrong.
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return q, k, v


def _in_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As F.scaled_dot_product_attention under autocast: one dtype for all three (a float32 rotary embedding leaves v alone in bf16)."""
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))
    return q, k, v


def _sizes(q: Tensor, k: Tensor, layout: SequenceLayout) -> dict[str, int]:
    """Return what masks and biases are checked against, of the whole sequence."""
    return dict(
        length=q.shape[2] * layout.size,
        batch=q.shape[0],
        key_length=k.shape[2] * layout.size,
        heads=q.shape[1],
        multiple=layout.multiple,
    )


def _checked_layout(layout: SequenceLayout, degrees: SequenceLayout, tokens: int) -> SequenceLayout:
    given, expected = ((each.ring_size, each.ulysses_size) for each in (layout, degrees))
    if given != expected:
        raise SequenceParallelError(
            f"a layout of ring {given[0]} x ulysses {given[1]} on a mesh of ring {expected[0]} x ulysses {expected[1]}: they must be equal"
        )
    layout.check_length(tokens * degrees.size)
    return layout


def _scores(
    mask: AttentionMask,
    softcap: float | None,
    bias: Tensor | None,
    score_mod: ScoreMod | Callable[..., Tensor] | None,
    dropout: AttentionDropout | None,
    sizes: dict[str, int],
) -> Scores:
    if bias is not None:
        if bias.dim() != 4 or not bias.is_floating_point():
            raise SequenceParallelError(
                f"bias of shape {tuple(bias.shape)}, {bias.dtype}: must be floating point, (rows or 1, heads or 1, S or 1, T); a boolean mask "
                "is AttentionMask(dense=...)"
            )
        check_whole("bias", bias, **sizes)
    samples = dropout.samples if dropout is not None else None
    if samples is not None and samples.shape != (sizes["batch"],):
        raise SequenceParallelError(
            f"dropout.samples of shape {tuple(samples.shape)}: must be one number for each of {sizes['batch']} rows"
        )
    if score_mod is not None and not isinstance(score_mod, ScoreMod):
        score_mod = ScoreMod(score_mod)
    assert mask.mask_mod is None or isinstance(mask.mask_mod, MaskMod)
    tensors = score_mod.tensors if score_mod is not None else ()
    if dropout is not None and not dropout.probability:
        dropout = None
    return Scores(
        softcap=float(softcap or 0.0), bias=bias, score_mod=score_mod, tensors=tensors, dense=mask.dense, mask_mod=mask.mask_mod,
        dropout=dropout,
    )  # fmt: skip


def _check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, softcap: float | None, ulysses_size: int) -> None:
    """Shapes are equal on all ranks, so all ranks raise together and no collective is needed."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise SequenceParallelError(f"{shapes}: must be (batch, heads, tokens, head dim); reshape or transpose them")
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[2] == v.shape[2] and k.shape[1] == v.shape[1]):
        raise SequenceParallelError(
            f"{shapes}: the batch must be equal, and k, v have the same tokens and heads; expand the smaller one"
        )
    if q.shape[1] % k.shape[1]:
        raise SequenceParallelError(
            f"{shapes}: the {q.shape[1]} query heads must be a multiple of the {k.shape[1]} key-value heads; "
            "choose numbers of heads that divide"
        )
    if q.shape[3] != k.shape[3]:
        raise SequenceParallelError(f"{shapes}: the head dims of q and k must be equal; project both to one")
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
