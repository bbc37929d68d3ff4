"""Every attention kernel on this device: is it right, and how fast beside the device's own matrix product?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.attention import (
    SHAPES,
    Case,
    Clock,
    emulated_ring,
    kernel_row,
    matmul_flops_per_s,
    ring_row,
)
from benchmarks.gpu.part import Case as PartCase
from benchmarks.gpu.part import Part, Row, Setting
from lightning_sp.attention import AttentionMask
from lightning_sp.attention.kernels.flash_attn import FlashAttnKernel
from lightning_sp.attention.kernels.self_check import is_right
from lightning_sp.attention.kernels.tiled import TiledKernel
from lightning_sp.attention.kernels.torch_efficient import TorchEfficientKernel
from lightning_sp.attention.kernels.torch_flash import TorchCpuKernel, TorchCudaKernel
from lightning_sp.attention.kernels.torch_flex import TorchFlexKernel
from lightning_sp.attention.reference import reference_attention

# The kernels of a kind of device, with the dtypes that they are for.
_HALF = (torch.bfloat16, torch.float16)
KERNELS: dict[str, tuple[tuple[type[Any], tuple[torch.dtype, ...]], ...]] = {
    "cuda": (
        (TorchCudaKernel, _HALF),
        (FlashAttnKernel, _HALF),
        (TorchEfficientKernel, (torch.float32, *_HALF)),
        (TiledKernel, (torch.float64, torch.float32)),
    ),
    "cpu": ((TorchCpuKernel, (torch.float64, torch.float32, torch.bfloat16)), (TiledKernel, (torch.float64,))),
}
_NAMES = ("out", "dq", "dk", "dv")
_RING = 4


# What changes the scores, each alone and all together.
_CHANGES = ("softcap", "bias", "score_mod", "dense mask", "mask_mod")


def checked(kind: type[Any], dtype: torch.dtype, changes: tuple[str, ...], setting: Setting) -> Row:
    """Try a kernel on one small block, forward and backward, against plain torch."""
    return {"right": is_right(kind, torch.device(setting.device), dtype, changes, 16 if setting.tiny else 128)}


def errors(length: int, dtype: torch.dtype, setting: Setting) -> Row:
    """Compare the RMS error of a ring of four with twice that of one unsharded call, both against float64."""
    case = Case("8/2/64", length, str(dtype).removeprefix("torch."), setting.device)
    exact = _exact(case)
    with torch.no_grad():
        ring = emulated_ring(case, _RING)
        one = emulated_ring(case, 1)
    row: Row = {"kernel": case.block_kernel().kernel.name}
    for name, found, alone, true in zip(_NAMES, ring, one, exact, strict=True):
        ours, theirs = ((each.double() - true).square().mean().sqrt().item() for each in (found, alone))
        row |= {f"{name} ring": f"{ours:.2e}", f"{name} one": f"{theirs:.2e}"}
        row["right"] = row.get("right", True) and ours <= 2 * theirs + torch.finfo(true.dtype).eps
    return row


def _exact(case: Case) -> list[Tensor]:
    q, k, v, grad = (each.double() for each in case.inputs())
    leaves = [each.detach().requires_grad_(True) for each in (q, k, v)]
    out = reference_attention(*leaves, AttentionMask())
    out.backward(grad)
    return [out.detach(), *(each.grad for each in leaves if each.grad is not None)]


def _right(setting: Setting) -> Iterator[PartCase]:
    for kind, dtypes in KERNELS[setting.device]:
        for dtype in dtypes:
            yield f"{kind.__name__} {dtype}", partial(checked, kind, dtype, (), setting)
    if setting.device == "cuda":
        for changes in (*((each,) for each in _CHANGES), _CHANGES):
            for dtype in (*_HALF, torch.float32):
                name = f"TorchFlexKernel {', '.join(changes)} {dtype}"
                yield name, partial(checked, TorchFlexKernel, dtype, changes, setting)
    for dtype in dict.fromkeys(each for _, dtypes in KERNELS[setting.device] for each in dtypes):
        yield f"ring of {_RING}, {dtype}", partial(errors, 64 if setting.tiny else 2048, dtype, setting)


def speed(shape: str, length: int, ring_size: int, setting: Setting) -> Row:
    """Time the kernel over a sequence, or all ranks of a ring that hold it, in turn."""
    clock = Clock(setting.device, warmup=1, repeats=2 if setting.tiny else 5)
    case = Case(shape, length, str(setting.dtype).removeprefix("torch."), setting.device)
    with torch.no_grad():
        matmul = matmul_flops_per_s(64 if setting.tiny else 8192, case.dtype, clock)
        row = kernel_row(case, clock, matmul) if ring_size == 1 else ring_row(case, ring_size, clock, matmul)
    cells: Row = {"kernel": case.block_kernel().kernel.name, "matmul TFLOP/s": f"{matmul / 1e12:.3g}"}
    for phase in ("forward", "backward"):
        cells[f"{phase} ms"] = f"{1e3 * row[phase]['median_s']:.2f}"
        cells[f"{phase} TFLOP/s"] = f"{row[phase]['flops_per_s'] / 1e12:.3g}"
        cells[f"{phase} of matmul"] = f"{row[phase]['share_of_matmul']:.0%}"
    if ring_size == 1:
        return cells | {"merge of forward": f"{row['merge_share']:.1%}"}
    return cells | {"hops hidden from GB/s": f"{row['hidden_from_bytes_per_s'] / 1e9:.3g}"}


def _speed(setting: Setting) -> Iterator[PartCase]:
    lengths, shapes = ((256,), ("4/2/32",)) if setting.tiny else ([2**n for n in (15, 17, 13, 19, 14, 16, 18)], SHAPES)
    for shape in shapes:
        for length in lengths:
            for ring_size in (1, 2) if setting.tiny else (1, 4, 8):
                yield f"{shape}, {length:,} tokens, ring {ring_size}", partial(speed, shape, length, ring_size, setting)


RIGHT = Part("each kernel on a small block against plain torch; a ring's RMS error beside one call's", 150, _right)
SPEED = Part("TFLOP/s of the block kernel and of a ring's ranks in turn, beside a matrix product", 420, _speed)
