"""Layers split over ranks: attention by its heads, MLPs by their inner width (Megatron-LM, arXiv:1909.08053)."""

from lightning_sp.parallelize.tensor_parallel.layers import tensor_parallel, with_whole_weights
from lightning_sp.parallelize.tensor_parallel.parameters import gather_plain_parts
from lightning_sp.parallelize.tensor_parallel.split_model import check_split, split_model

__all__ = ["check_split", "gather_plain_parts", "split_model", "tensor_parallel", "with_whole_weights"]
