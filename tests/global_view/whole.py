"""What every rank has whole in the cases of the table of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

E, H, V = 8, 4, 11


class Whole:
    """Tensors that every rank has, made from one seed."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.weight, self.bias, self.table = draw(E, E), draw(E), draw(V, E)
        self.positions, self.head = draw(length, E), draw(V, E)
        self.qkv = draw(3 * E, E)
        self.mixing = draw(length, length)
        self.relative = draw(1, H, length, length)
        self.rows = draw(2, E)
        self.images = draw(2 * length, E)
        self.kernel, self.full_kernel = draw(E, 1, 3), draw(E, E, 3)


Case = Callable[[Tensor, Tensor, Tensor, Whole], Any]
