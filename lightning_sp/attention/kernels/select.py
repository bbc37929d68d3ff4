"""Which kernel computes: the one asked for, or the next that can, with one warning."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sp.attention.kernels.flash_attn import FlashAttnKernel
from lightning_sp.attention.kernels.flash_layout import MAX_FLASH_HEAD_DIM
from lightning_sp.attention.kernels.kernel import Kernel
from lightning_sp.attention.kernels.self_check import is_right
from lightning_sp.attention.kernels.tiled import TiledKernel
from lightning_sp.attention.kernels.torch_efficient import TorchEfficientKernel
from lightning_sp.attention.kernels.torch_flash import TorchCpuKernel, TorchCudaKernel
from lightning_sp.attention.kernels.torch_flex import TorchFlexKernel
from lightning_sp.attention.spec.scores import SCORE_TILE, ScoreGradients, Scores
from lightning_sp.config import KERNELS, AttentionOptions
from lightning_sp.errors import SequenceParallelError, closest


def check_kernel(name: str, device_type: str, dtype: torch.dtype, head_dim: int) -> None:
    """Refuse what no local kernel serves, from values that are equal on all ranks: called before the first collective.

    Raises:
        SequenceParallelError: an unknown kernel, a dtype or a head dim that it does not take.
    """
    if name not in KERNELS:
        raise SequenceParallelError(f"kernel={name!r}: must be one of {', '.join(KERNELS)}{closest(name, KERNELS)}")
    if dtype not in _DTYPES:
        raise SequenceParallelError(f"attention in {dtype}: must be one of {', '.join(map(str, _DTYPES))}")
    if name == "flash_attn" and (device_type != "cuda" or dtype not in _HALF):
        raise SequenceParallelError(
            f"kernel='flash_attn' with {dtype} on {device_type}: flash-attn takes bfloat16 and float16 on CUDA; "
            "use kernel='torch' or precision='bf16-true'/'bf16-mixed'"
        )
    if device_type == "cuda" and dtype in _HALF and head_dim > MAX_FLASH_HEAD_DIM:
        raise SequenceParallelError(
            f"head dim {head_dim} in {dtype} on CUDA: the flash kernels take at most {MAX_FLASH_HEAD_DIM}; use precision='32-true'"
        )


def select_kernel(
    options: AttentionOptions,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    scores: Scores,
    gradients: ScoreGradients | None = None,
) -> Kernel:
    """Return the local kernel for the options, a device and a dtype that `check_kernel` let through.

    What a fused kernel does not compute goes to the tiled one, with one warning that names both.

    Args:
        options: of the attention; `kernel` names one.
        device: of the tensors.
        dtype: of the tensors.
        head_dim: of the queries.
        scores: what changes the scores.
        gradients: where a backward adds the gradients of what of it is learned.

    Raises:
        SequenceParallelError: flash_attn was asked for and is not installed, or the GPU is too old for a flash kernel.
    """
    if device.type == "cuda" and dtype in _HALF:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            raise SequenceParallelError(
                f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; the flash kernels need 8.0 or "
                "newer; use precision='32-true' there"
            )
    asked, serving = kernel_for(options.kernel, device.type, dtype, scores.names())
    # Two kinds of GPU and one version of torch have run ours; what was asked for by name is taken.
    unproven = serving in (TorchCudaKernel, TorchEfficientKernel)
    if unproven and options.kernel == "auto" and not is_right(serving, device, dtype, (), head_dim):
        return TiledKernel(scores, gradients)
    if serving is TorchFlexKernel and not (gradients is not None and gradients.are_wanted):
        fits = is_right(serving, device, dtype, tuple(scores.names()), head_dim)
        return serving(scores) if fits else TiledKernel(scores, gradients)
    if serving not in (TiledKernel, TorchFlexKernel):
        fused: Kernel = serving(scores.softcap) if serving is FlashAttnKernel else serving()
        return fused
    if asked is TiledKernel:
        _say_once(
            f"attention in {dtype} on {device.type}: {TiledKernel.name} computes it, several times slower than the fused kernels of float32, "
            "bfloat16 and float16; precision='32-true' or 'bf16-mixed' takes those"
        )
    else:
        learned = ", with gradients of what is learned of it," if serving is TorchFlexKernel else ""
        _say_once(
            f"{asked.name} computes no {', '.join(scores.names())}{learned}: {TiledKernel.name} does it, several times slower and in tiles of "
            f"{SCORE_TILE} x {SCORE_TILE} scores"
        )
    return TiledKernel(scores, gradients)


def kernel_for(name: str, device_type: str, dtype: torch.dtype, changes: Sequence[str]) -> tuple[type[Any], type[Any]]:
    """Return the kernel for an option, a device and a dtype, and the one that serves in its place where scores are changed.

    Args:
        name: the option.
        device_type: "cpu" or "cuda".
        dtype: of the tensors.
        changes: of the scores, `Scores.names`.
    """
    if device_type == "cpu":
        asked: type[Any] = TorchCpuKernel
    elif dtype == torch.float32:
        asked = TorchEfficientKernel
    elif dtype not in _HALF:
        # No operator of CUDA's takes float64: for exactness checks there.
        asked = TiledKernel
    else:
        asked = FlashAttnKernel if name == "flash_attn" else TorchCudaKernel
    if not changes or (asked is FlashAttnKernel and list(changes) == ["softcap"]):
        return asked, asked
    fused = asked not in (TorchCpuKernel, TiledKernel) and "dropout" not in changes
    return asked, TorchFlexKernel if fused else TiledKernel


@lru_cache
def _say_once(text: str) -> None:
    rank_zero_warn(text)


_HALF = (torch.bfloat16, torch.float16)


_DTYPES = (*_HALF, torch.float32, torch.float64)
