"""The loss without logits of a head of Llama 3 8B's width on one device: how many tokens' logits at a time are worth their memory?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from benchmarks.gpu.part import Case, Part, Row, Setting
from lightning_sp import linear_cross_entropy
from lightning_sp.loss.output_head.chunked_head import auto_chunk_tokens

_WIDTH, _TOKENS = 4096, 32_768
_VOCABULARIES = (128_256, 32_000)
# 64 tokens of 128K words and 262 of 32K are 32 MiB, a CPU's.
_CHUNKS = (64, 256, 512, 1024, 2048, 4096, 8192)


def loss(vocabulary: int, chunk_tokens: int | str, setting: Setting) -> Row:
    """Time the loss forward and backward, and what it takes beside the weights and hidden states."""
    width, tokens = (64, 256) if setting.tiny else (_WIDTH, _TOKENS)
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=False, device=setting.device, dtype=setting.dtype)
    hidden = torch.randn(1, tokens, width, device=setting.device, dtype=setting.dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (1, tokens), device=setting.device)
    seconds, before = [], 0
    for _ in range(2 if setting.tiny else 6):
        head.weight.grad = hidden.grad = None
        setting.wait()
        if setting.device == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        linear_cross_entropy(hidden, head, targets, chunk_tokens=chunk_tokens).backward()
        setting.wait()
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds[1:])
    row: Row = {
        "tokens at a time": auto_chunk_tokens(vocabulary, hidden.device) if chunk_tokens == "auto" else chunk_tokens,
        "ms": f"{1e3 * median:.2f}",
        # A product forward and two backward, each of 2 operations a token, word and width.
        "TFLOP/s": f"{6 * tokens * vocabulary * width / median / 1e12:.3g}",
    }
    if setting.device == "cuda":
        row["GiB beside"] = f"{(torch.cuda.max_memory_allocated() - before) / 2**30:.2f}"
    return row


def _cases(setting: Setting) -> Iterator[Case]:
    vocabularies, chunks = ((97,), (64,)) if setting.tiny else (_VOCABULARIES, _CHUNKS)
    for vocabulary in vocabularies:
        for chunk_tokens in ("auto", *chunks):
            yield f"{vocabulary:,} words, {chunk_tokens} tokens", partial(loss, vocabulary, chunk_tokens, setting)


LOSS = Part("the loss without logits, by how many tokens' logits there are at a time", 60, _cases)
