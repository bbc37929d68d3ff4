"""Random states as plain values: per rank at equal degrees, else derived from (seed, step, data-parallel rank, sequence rank)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lightning_sp.context.streams import mixed_seed


def derived_seed(seed: int, step: int, stream: int) -> int:
    """Return the seed of one rank's stream, from optimizer step `step` on.

    Args:
        seed: of the run.
        step: optimizer steps done.
        stream: data-parallel rank x sequence-parallel size + rank within the sequence.
    """
    return mixed_seed(seed, step, stream)


def random_state() -> dict[str, Any]:
    """Return this process's random states (torch, the current CUDA device, Python, numpy) in plain containers."""
    name, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(key).astype(np.int64)), int(position), int(has_gauss), float(gauss)),
    }  # fmt: skip


def restore_random_state(state: dict[str, Any]) -> None:
    """Set what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, key, *rest = state["numpy"]
    np.random.set_state((name, key.numpy().astype(np.uint32), *rest))
