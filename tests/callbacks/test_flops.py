"""The model's FLOPs are those that torch's counter counts; the peak is that of the device and precision."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_sp.callbacks import AttentionShape
from lightning_sp.callbacks.flops import find_attention_shape, model_flops, num_matrix_parameters, peak_flops
from lightning_sp.errors import SequenceParallelError
from lightning_sp.models import GPTConfig, HuggingFaceConfig
from tests.callbacks.runs import LLAMA

GPT = GPTConfig(vocab_size=32, max_positions=64, dim=32, num_layers=2, num_heads=4)


HUGGING_FACE = HuggingFaceConfig(
    "llama",
    {
        "vocab_size": 32,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "tie_word_embeddings": True,
    },
)


@pytest.mark.parametrize("config", [LLAMA, GPT, HUGGING_FACE], ids=lambda c: type(c).__name__)
def test_model_flops_are_those_that_torch_counts(config):
    """torch's counter takes causal attention in full: twice what the formula's halved part says."""
    model, rows, length = config.build(), 2, 64
    positions = torch.arange(length).expand(rows, -1)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = model(input_ids=torch.zeros(rows, length, dtype=torch.long), position_ids=positions)
        (output if isinstance(output, torch.Tensor) else output.logits).sum().backward()
    shape = find_attention_shape(model)
    assert shape == AttentionShape(num_layers=2, num_heads=4, head_dim=8)
    num_parameters = num_matrix_parameters(model)
    total = model_flops(num_parameters=num_parameters, attention=shape, num_sequences=rows, sequence_length=length)
    matrices = 6 * num_parameters * rows * length
    counted = counter.get_total_flops()
    if config is HUGGING_FACE:
        assert num_parameters == sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert counted == matrices + 2 * (total - matrices)


def test_tables_that_are_only_looked_up_do_not_count():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    assert num_matrix_parameters(model) == 12
    assert find_attention_shape(model) is None


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", 312e12),
        ("NVIDIA H100 80GB HBM3", "bf16-true", 989.5e12),
        ("NVIDIA H100 PCIe", "bf16-mixed", 756e12),
        ("NVIDIA H100 NVL", "bf16-mixed", 835.5e12),
        ("NVIDIA H200", "64-true", 34e12),
        ("NVIDIA B200", "bf16-mixed", 2250e12),
        ("NVIDIA GB200", "bf16-mixed", 2500e12),
        ("NVIDIA H200", "16-mixed", None),
        ("Tesla T4", "bf16-mixed", None),
    ],
)
def test_peak_by_device_and_precision(device, precision, expected):
    assert peak_flops(device, precision) == expected


def test_float32_peak_follows_what_torch_may_use():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert peak_flops("NVIDIA A100-SXM4-40GB", "32-true") == 19.5e12
        torch.set_float32_matmul_precision("high")
        assert peak_flops("NVIDIA A100-SXM4-40GB", "32-true") == 156e12
    finally:
        torch.set_float32_matmul_precision(before)


def test_an_attention_without_heads_is_refused():
    with pytest.raises(SequenceParallelError, match=r"num_heads=0.*at least 1"):
        AttentionShape(num_layers=1, num_heads=0, head_dim=8)


def test_each_matrix_of_a_module_that_has_several_counts():
    attention = torch.nn.MultiheadAttention(8, 2, kdim=4, vdim=4)  # three of its own, and the output's
    assert num_matrix_parameters(attention) == 8 * 8 + 2 * 8 * 4 + 8 * 8
