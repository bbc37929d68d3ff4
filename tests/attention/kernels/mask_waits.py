"""Prints for what the host waits where a mask is searched and computed on a device: a process of its own, for torch gets a device."""

from __future__ import annotations

import json
from collections import Counter

import torch

from benchmarks.instruments.simulated_device import WAIT, SimulatedDevice
from lightning_sp.attention.kernels.tiled import TiledKernel
from lightning_sp.attention.plan.block_sparsity import search
from lightning_sp.attention.plan.blocks import Plan
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.attention.spec.positions import whole_positions
from lightning_sp.attention.spec.score_mod import MaskMod
from lightning_sp.attention.spec.scores import ScoreGradients, Scores
from lightning_sp.layout import SequenceLayout

# More than one tile of the kernel, and longer than the mask and the bias, which padding follows.
LENGTH, WHOLE = 2048, 2000


def waits(device: SimulatedDevice) -> dict[str, dict[str, int]]:
    """Return the waits of the search and of the kernel, by the line's function."""
    q = torch.empty(1, 2, LENGTH, 16, device=device.device)
    bias = torch.empty(1, 2, WHOLE, WHOLE, device=device.device)
    of_masks = {
        "function": Scores(mask_mod=MaskMod(lambda row, head, query, key: (query - key).abs() < 300), bias=bias),
        "matrix": Scores(dense=torch.empty(1, 1, WHOLE, WHOLE, dtype=torch.bool, device=device.device), bias=bias),
    }
    found = {}
    for name, scores in of_masks.items():
        device.notes.clear()
        search(scores, Plan(AttentionMask(causal=False), SequenceLayout(), LENGTH, 1), 0, (0, 2), q, (None, None))
        kernel = TiledKernel(scores, ScoreGradients.like(scores, wanted=True))
        out, lse = kernel.forward(q, q, q, causal=False, scale=1.0, positions=whole_positions(q, q))
        kernel.backward(out, q, q, q, out, lse, causal=False, scale=1.0, positions=whole_positions(q, q))
        found[name] = dict(Counter(note.where.split()[-1] for note in device.notes if note.kind == WAIT))
    return found


if __name__ == "__main__":
    with SimulatedDevice({}) as simulated:
        simulated.noting = True
        print(json.dumps(waits(simulated)))
