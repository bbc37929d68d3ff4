"""Backwards of torch's own functions, which the backward of a user's `autograd.Function` calls."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_sp.global_view.calls.call import Rule, named
from lightning_sp.global_view.rules.composed import written_out
from lightning_sp.global_view.rules.pointwise import pointwise

NUMBER_BY_NUMBER = """
    sigmoid_backward tanh_backward gelu_backward silu_backward mish_backward threshold_backward elu_backward leaky_relu_backward
    hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward softshrink_backward
"""


def softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """Give the scores of a softmax their gradient."""
    weighed = grad * output
    return (weighed - output * weighed.sum(dim, keepdim=True)).to(input_dtype)


def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """Give the scores of a softmax their gradient, by that of its logarithms."""
    return (grad - output.exp() * grad.sum(dim, keepdim=True)).to(input_dtype)


RULES: dict[str, Rule] = {
    **named("softmax_backward_data", written_out(softmax_backward)),
    **named("log_softmax_backward_data", written_out(log_softmax_backward)),
    **named(NUMBER_BY_NUMBER, pointwise),
}
