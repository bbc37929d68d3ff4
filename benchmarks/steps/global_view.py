"""What the global view costs the host: microseconds of each function of torch on a tensor of the sequence, beside the same on its part.

    python -m benchmarks.steps.global_view [--compiled [inductor]]

One process plays the first of two ranks; what is timed sends nothing. CPU time, the least of many rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.global_view.compiled.front_end import front_end
from lightning_sp.global_view.table import dispatch
from lightning_sp.global_view.tensors.placement import Placement, Storage
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor
from lightning_sp.layout import SequenceLayout

TOKENS, FEATURES, ROUNDS, CALLS = 16, 8, 200, 50
WEIGHT, BIAS = torch.randn(FEATURES, FEATURES), torch.randn(FEATURES)
FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "x + x": lambda x: x + x,
    "x * bias": lambda x: x * BIAS,
    "x.view": lambda x: x.view(1, -1, 2, FEATURES // 2),
    "x.transpose": lambda x: x.transpose(1, 2),
    "F.linear": lambda x: F.linear(x, WEIGHT),
    "F.layer_norm": lambda x: F.layer_norm(x, (FEATURES,)),
    "x.softmax(-1)": lambda x: x.softmax(-1),
    "x[..., :4]": lambda x: x[..., :4],
    "x.shape": lambda x: x.shape,
}


def tensors() -> tuple[SequenceTensor, Tensor]:
    """Return a tensor of the sequence, and its part."""
    layout = SequenceLayout(ulysses_size=2)
    info = SequenceInfo(
        rows=1, length=TOKENS, padded_length=TOKENS, boundaries=None, position_ids=None, shift_labels=None, layout=layout
    )  # fmt: skip
    nothing: Any = None
    storage = Storage(
        layout=layout, rank=0, capacity=TOKENS, group=nothing, attend=nothing, note_reduction=nothing, dispatch=dispatch,
        sequence=info, agree=nothing, own_draws=nothing,
    )  # fmt: skip
    local = torch.randn(1, TOKENS // 2, FEATURES)
    return SequenceTensor(local, Placement(storage=storage, dim=1, length=TOKENS)), local


def microseconds(function: Callable[[Tensor], Any], x: Tensor) -> float:
    """Return the CPU time of a call."""
    least = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(CALLS):
            function(x)
        least = min(least, time.process_time() - began)
    return least / CALLS * 1e6


class Mlp(nn.Module):
    """What a block does beside its attention, 14 functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 4 * FEATURES)
        self.down = nn.Linear(4 * FEATURES, FEATURES)
        self.register_buffer("scale", torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output. Shapes: (B, S, E) -> (B, S, E)."""
        b, s, e = x.shape
        table = torch.arange(s, device=x.device)[:, None] / s
        x = x + (x * table).view(b, s, 2, e // 2).transpose(2, 3).reshape(b, s, e)
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


def compiled(backend: str = "aot_eager") -> None:
    """Print what a forward and backward of `Mlp` costs on a part, in the global view, and compiled there."""
    shown, local = tensors()
    block, alone = Mlp(), Mlp()
    runs: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
        "a part": (alone.forward, local),
        "global view": (block.forward, shown),
        "global view, compiled": (front_end(backend).compiled(block.forward), shown),
    }

    def step(forward: Callable[[Tensor], Any], x: Tensor) -> None:
        out = forward(x)
        (out.local if isinstance(out, SequenceTensor) else out).sum().backward()

    print("| | forward, us | forward and backward, us |\n|---|---|---|")
    for name, (forward, x) in runs.items():
        step(forward, x)
        print(f"| {name} | {microseconds(forward, x):.0f} | {microseconds(partial(step, forward), x):.0f} |")


def main() -> None:
    """Print the table."""
    if sys.argv[1:2] == ["--compiled"]:
        compiled(*sys.argv[2:])
        return
    shown, local = tensors()
    print("| function | part, us | global view, us | more, us |\n|---|---|---|---|")
    for name, function in FUNCTIONS.items():
        part, whole = microseconds(function, local), microseconds(function, shown)
        print(f"| `{name}` | {part:.1f} | {whole:.1f} | {whole - part:.1f} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
