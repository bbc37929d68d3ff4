"""The table of docs/masks.md, generated from what the tests run: `python -m tests.mask_table` writes it.

A row is a mask or a change of the scores of the law (tests/attention/ranks/test_law.py), which holds for it under every scheme on the CPU; the
kernels are those that the library itself chooses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_sp.attention.kernels.select import kernel_for
from lightning_sp.attention.kernels.tiled import TiledKernel
from lightning_sp.attention.kernels.torch_flex import TorchFlexKernel
from tests.drawn_cases import masks

DOCUMENT = Path(__file__).parents[1] / "docs" / "masks.md"


@dataclass(frozen=True)
class Row:
    """One row: what it is called elsewhere, how it is said here, and the law's case.

    Args:
        title: the field's name, and models.
        said: the option.
        mask: a description for tests/drawn_cases/masks.py.
        options: of the law's case besides.
        changes: of the scores, as `Scores.names` says them.
    """

    title: str
    said: str
    mask: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    changes: tuple[str, ...] = ()


def _row(name: str, title: str, said: str) -> Row:
    mask = {**masks.NAMED, **masks.CROSS}[name]
    changes = [n for n, key in (("dense mask", "dense"), ("mask_mod", "mask_mod")) if key in mask]
    return Row(title, said, mask, {"keys": 21} if name in masks.CROSS else {}, tuple(changes))


ROWS: dict[str, Row] = {
    "causal": _row("causal", "causal", "`AttentionMask()`"),
    "full": _row("full", "full, bidirectional (BERT)", "`causal=False`"),
    "packed": _row("packed", "packed documents (cu_seqlens, document ids, restarting positions)", "`boundaries`"),
    "window left": _row("window left", "sliding window (Mistral, Gemma, Qwen2)", "`window_size=(W - 1, None)`"),
    "window right": _row("window right", "window to the right", "`causal=False, window_size=(None, W)`"),
    "window both": _row("window both", "window on both sides (Longformer's local part, ModernBERT)", "`causal=False, window_size=(L, R)`"),
    "window of itself": _row("window of itself", "window of one token", "`window_size=(0, 0)`"),
    "window over packed": _row("window over packed", "window over packed documents", "`window_size, boundaries`"),
    "chunks": _row("chunks", "chunked, causal (Llama 4)", "`chunk_size`"),
    "chunks both ways": _row("chunks both ways", "chunked, both ways", "`causal=False, chunk_size`"),
    "padding left": _row("padding left", "padding on the left", "`valid`"),
    "padding right": _row("padding right", "padding on the right", "`valid`"),
    "a row of padding": _row("a row of padding", "a row that is all padding", "`valid`"),
    "prefix": _row("prefix", "prefix-LM (PaliGemma)", "`bidirectional`"),
    "images in a window": _row("images in a window", "images among text, in a window (Gemma 3)", "`bidirectional, window_size`"),
    "all together": _row("all together", "all of the above together", "all of them"),
    "dense": _row("dense", "arbitrary boolean mask", "`dense`"),
    "dense over a window": _row("dense over a window", "arbitrary mask within a window", "`dense, window_size`"),
    "dense in blocks": _row("dense in blocks", "arbitrary boolean mask, whole blocks hidden", "`dense`"),
    "a function": _row("a function", "FlexAttention mask_mod", "`mask_mod`"),
    "a function over packed": _row("a function over packed", "mask_mod over packed documents", "`mask_mod, boundaries`"),
    "a function of documents": _row("a function of documents", "mask_mod that hides whole blocks", "`mask_mod`"),
    "blocks chosen by hand": _row("blocks chosen by hand", "FlexAttention BlockMask, blocks chosen by hand too", "`mask_mod=block_mask`"),
    "cross": _row("cross", "cross attention, keys of another length", "`causal=False`, k and v of their length"),
    "cross packed": _row("cross packed", "cross attention of packed pairs", "`boundaries, key_boundaries`"),
    "cross dense": _row("cross dense", "cross attention, arbitrary mask", "`dense`"),
    "cross a function": _row("cross a function", "cross attention, mask_mod", "`mask_mod`"),
    "sinks": Row("attention sinks (GPT-OSS), learned", "`sinks`", {}, dict(with_sinks=True)),
    "value dim": Row("values of another head dim (DeepSeek MLA)", "v of its head dim", {}, dict(dim_v=5)),
    "softcap": Row("logit softcap (Gemma 2)", "`softcap`", {}, dict(softcap=0.7), ("softcap",)),
    "bias": Row("additive bias (T5, Bloom), learned, given whole", "`bias`", {}, dict(bias="of keys"), ("bias",)),
    "alibi": Row("ALiBi, learned slopes too", "`score_mod=alibi(slopes)`", {}, dict(score_mod="alibi"), ("score_mod",)),
    "t5": Row("T5's relative positions, learned", "`score_mod=relative_position_bias(table)`", {},
        dict(score_mod="t5"), ("score_mod",)),
    "score_mod": Row("FlexAttention score_mod, learned operands", "`score_mod=ScoreMod(f, *tensors)`", {},
        dict(score_mod="bends"), ("score_mod",)),
    "dropout": Row("attention dropout, one mask at all degrees", "`dropout=AttentionDropout(p, seed)`", {}, dict(dropout=0.3), ("dropout",)),
}  # fmt: skip


_WORDS = {TiledKernel: "tiled", TorchFlexKernel: "flex"}


def table() -> str:
    """Return the document."""
    lines = [
        "# Masks, and what computes them",
        "",
        "Generated by `python -m tests.mask_table` from the cases of `tests/attention/ranks/test_law.py`.",
        "The law holds each row to the plain reference: outputs and every gradient, float64, 1e-10.",
        "It runs on 1, 2 and 4 CPU ranks, five rows on 8 (slow). `tests/attention/ranks/test_memory.py` bounds the peak memory",
        "at 32,768 tokens. CUDA: the same code, emulated on the CPU; dense, packed and window ran on one H200.",
        "",
        f'- "fused": {_name("auto", "cpu", torch.float32, ())} on the CPU; {_name("auto", "cuda", torch.bfloat16, ())} or'
        f" {_name('flash_attn', 'cuda', torch.bfloat16, ())} on CUDA in bfloat16 and float16,",
        f'  {_name("auto", "cuda", torch.float32, ())} in float32. With kernel="auto" torch\'s kernels for CUDA compute one small',
        "  block first: where it is wrong, tiled takes their place, with a warning.",
        f'- "flex": {TorchFlexKernel.name}, compiled, after such a block with changes of this kind; not run on a GPU. The',
        "  gradients of what is learned (a bias, slopes, a table) are tiled.",
        f'- "tiled": {TiledKernel.name}, on any device, from float16 to float64, with one warning. CUDA in float64 is',
        "  always tiled.",
        "",
        "| mask | given as | Ulysses | ring | both | CPU | CUDA, torch | CUDA, flash-attn |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS.values():
        kernels = [
            _WORDS.get(kernel_for(name, device, dtype, row.changes)[1], "fused")
            for name, device, dtype in (
                ("auto", "cpu", torch.float32),
                ("auto", "cuda", torch.bfloat16),
                ("flash_attn", "cuda", torch.bfloat16),
            )
        ]
        lines.append(f"| {row.title} | {row.said} | exact | exact | exact | {' | '.join(kernels)} |")
    return "\n".join(lines) + "\n"


def _name(name: str, device: str, dtype: torch.dtype, changes: tuple[str, ...]) -> str:
    return str(kernel_for(name, device, dtype, changes)[1].name)


if __name__ == "__main__":
    DOCUMENT.write_text(table())
