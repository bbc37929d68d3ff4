"""What a training step must compute, and what a device can: the two sides of model FLOPs utilisation.

Per token a forward and backward pass multiplies by every weight matrix three times, at 2 FLOPs each: 6 N. Attention adds,
for a layer with H heads of width D over a causal sequence of S tokens,

    q k^T and p v:   2 x (2 S^2 H D) FLOPs forward, twice that backward = 12 S^2 H D,
    half of it masked by causality                                      =  6 S^2 H D.

Recomputation does not count: it is the model's work, not the machine's.
Source: PaLM, https://arxiv.org/abs/2204.02311, appendix B (6N + 12 L H Q T per token), halved for causality.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lightning_sp.errors import SequenceParallelError

# Dense peaks in FLOP/s, from NVIDIA's data sheets (half of what they print "with sparsity"). The first name that is part
# of the device's name counts: longer names stand first.
PEAK_FLOPS: dict[str, dict[str, float]] = {
    "GB200": {"float64": 40e12, "float32": 80e12, "tfloat32": 1250e12, "bfloat16": 2500e12},
    "B200": {"float64": 37e12, "float32": 75e12, "tfloat32": 1125e12, "bfloat16": 2250e12},
    "H200 NVL": {"float64": 30e12, "float32": 60e12, "tfloat32": 417.5e12, "bfloat16": 835.5e12},
    "H200": {"float64": 34e12, "float32": 67e12, "tfloat32": 494.5e12, "bfloat16": 989.5e12},
    "H100 NVL": {"float64": 30e12, "float32": 60e12, "tfloat32": 417.5e12, "bfloat16": 835.5e12},
    "H100 PCIe": {"float64": 26e12, "float32": 51e12, "tfloat32": 378e12, "bfloat16": 756e12},
    "H100": {"float64": 34e12, "float32": 67e12, "tfloat32": 494.5e12, "bfloat16": 989.5e12},
    "A100": {"float64": 9.7e12, "float32": 19.5e12, "tfloat32": 156e12, "bfloat16": 312e12},
}


@dataclass(frozen=True)
class AttentionShape:
    """The attention of a whole model: its layers, and the query heads of each with their width."""

    num_layers: int
    num_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_heads, self.head_dim) < 1:
            raise SequenceParallelError(f"{self}: each must be at least 1")


def find_attention_shape(model: nn.Module) -> AttentionShape | None:
    """Read the attention's shape from the first ``config`` in the model that has one, in this package's or Hugging Face's names."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            return None  # two sequences, and three kinds of attention
        num_layers = getattr(config, "num_layers", None) or getattr(config, "num_hidden_layers", None)
        num_heads = getattr(config, "num_heads", None) or getattr(config, "num_attention_heads", None)
        if not isinstance(num_layers, int) or not isinstance(num_heads, int):
            continue
        width = getattr(config, "hidden_size", None)
        head_dim = getattr(config, "head_dim", None) or (width // num_heads if isinstance(width, int) else None)
        if isinstance(head_dim, int):
            return AttentionShape(num_layers, num_heads, head_dim)
    return None


def num_matrix_parameters(model: nn.Module) -> int:
    """Count the weights that every token is multiplied by: matrices, without tables that are only looked up.

    An output head tied to the embedding counts: it is multiplied by. Experts of a mixture all count, although a token
    meets few of them. Sharded parameters count whole.
    """
    matrices = {}
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            for parameter in module.parameters(recurse=False):
                if parameter.ndim >= 2:
                    matrices[id(parameter)] = parameter.numel()
    return sum(matrices.values())


def model_flops(*, num_parameters: int, attention: AttentionShape, num_sequences: int, sequence_length: int) -> int:
    """Return the FLOPs of one forward and backward over ``num_sequences`` causal sequences; see the module's derivation.

    A packed sequence counts as one whole document: the documents' own attention is less.
    """
    matrices = 6 * num_parameters * sequence_length
    pairs = attention.num_heads * attention.head_dim * sequence_length**2
    return num_sequences * (matrices + 6 * attention.num_layers * pairs)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return a device's dense peak in FLOP/s for a Lightning precision, None where it is not known.

    Args:
        device_name: As `torch.cuda.get_device_name` gives it.
        precision: Lightning's, such as "bf16-mixed". float32 means TF32 where torch is allowed to use it.
    """
    if precision.startswith("bf16"):
        dtype = "bfloat16"
    elif precision.startswith("64"):
        dtype = "float64"
    elif precision.startswith("32"):
        dtype = "float32" if torch.get_float32_matmul_precision() == "highest" else "tfloat32"
    else:
        return None
    return next((peaks[dtype] for name, peaks in PEAK_FLOPS.items() if name in device_name), None)
