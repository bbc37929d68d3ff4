"""Which kernel is selected, and what each refuses."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

from lightning_sp.attention.kernels.select import _say_once, check_kernel, select_kernel
from lightning_sp.attention.kernels.tiled import TiledKernel
from lightning_sp.attention.kernels.torch_flash import TorchCpuKernel
from lightning_sp.attention.spec.scores import Scores
from lightning_sp.config import AttentionOptions
from lightning_sp.errors import SequenceParallelError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("flash-attn", "cuda", torch.bfloat16, 64), "kernel='flash-attn': must be one of auto, torch, flash_attn; did you mean 'flash_attn'?"),
        (("flash_attn", "cpu", torch.bfloat16, 64), "kernel='flash_attn' with torch.bfloat16 on cpu: flash-attn takes"),
        (("flash_attn", "cuda", torch.float32, 64), "kernel='flash_attn' with torch.float32 on cuda: flash-attn takes"),
        (("auto", "cuda", torch.bfloat16, 320), "head dim 320 in torch.bfloat16 on CUDA: the flash kernels take at most 256"),
        (("auto", "cpu", torch.int64, 64), "attention in torch.int64: must be one of torch.bfloat16, torch.float16"),
    ],
)  # fmt: skip
def test_kernels_refuse_what_they_do_not_take(arguments, message):
    with pytest.raises(SequenceParallelError, match=re.escape(message)):
        check_kernel(*arguments)


def test_what_a_fused_kernel_does_not_compute_goes_to_the_next_best_with_one_warning():
    _say_once.cache_clear()
    with pytest.warns(UserWarning, match="torch flash \\(cpu\\) computes no softcap: torch tiled matmul does it"):
        kernel = select_kernel(AttentionOptions(), torch.device("cpu"), torch.float32, 16, Scores(softcap=30.0))
    assert (type(kernel), kernel.scores.softcap) == (TiledKernel, 30.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select_kernel(AttentionOptions(), torch.device("cpu"), torch.float32, 16, Scores(softcap=30.0))
    assert isinstance(
        select_kernel(AttentionOptions(), torch.device("cpu"), torch.float32, 16, Scores()), TorchCpuKernel
    )
