"""What each rank runs in test_attention_copies.py: the operator under torch's profiler, and what it copied, exchange by exchange."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_sp.attention import AttentionMask, sequence_parallel_attention
from tests.attention.ranks.attention_ranks import mesh_of

# What moves elements from one tensor to another: clone, contiguous, to, stack and setitem all end in one of these.
MOVES = ("aten::copy_", "aten::cat")
OPERATORS = ("lightning_sp::attention", "GeneratedBackwardFor_lightning_sp_attention_defaultBackward")


def copies(ulysses, ring, heads, kv_heads, batch, length, dim, dtype):
    """Return, of a forward and of its backward, the copies before, between and after the two exchanges: [(name, elements, dtypes)]."""
    mesh = mesh_of(ulysses, ring)
    tokens = length // mesh.layout.size
    # Token-major memory, as a projection leaves it.
    q, k, v, grad = (
        torch.randn(batch, tokens, n, dim, dtype=dtype).transpose(1, 2) for n in (heads, kv_heads, kv_heads, heads)
    )
    for t in (q, k, v):
        t.requires_grad_(True)
    with profiled() as forward:
        out = sequence_parallel_attention(q, k, v, mesh=mesh, mask=AttentionMask())
    with profiled() as backward:
        torch.autograd.grad(out, (q, k, v), grad)
    return [parts(events(each)) for each in (forward, backward)]


def profiled():
    return profile(activities=[ProfilerActivity.CPU], record_shapes=True)


def events(profiler):
    """Return the operators of a profile in order; only its trace tells the dtypes and what a list of tensors held."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"trace{os.getpid()}.json"
        profiler.export_chrome_trace(str(file))
        found = json.loads(file.read_text())["traceEvents"]
    return sorted((e for e in found if e.get("cat") == "cpu_op"), key=lambda e: e["ts"])


def parts(found):
    """Cut what the operator did at its exchanges; what the kernel does inside is its own."""
    (operator,) = (e for e in found if e["name"] in OPERATORS)
    kernels = [e for e in found if "flash_attention_for_cpu" in e["name"]]
    answer = [[]]
    for event in found:
        if not within(event, operator) or any(within(event, kernel) for kernel in kernels):
            continue
        if event["name"] == "c10d::alltoall_base_":
            answer.append([])
        elif event["name"] in MOVES:
            (target, *_), (dtype, *sources) = event["args"]["Input Dims"], event["args"]["Input type"]
            is_list = event["name"] == "aten::cat"
            elements = sum(map(math.prod, target)) if is_list else math.prod(target)
            answer[-1].append((event["name"], elements, [dtype] if is_list else [dtype, sources[0]]))
    return answer


def within(event, other):
    return other["ts"] <= event["ts"] and event["ts"] + event["dur"] <= other["ts"] + other["dur"] and event != other
