"""The global random streams of torch, Python and numpy: put back, and begun from one seed, so that ranks draw alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lightning_sp.devices import is_accelerator, runtime


def mixed_seed(*numbers: int) -> int:
    """Return a seed made of several numbers: neighbouring ones give unrelated streams."""
    words = [number % 2**64 for number in numbers]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def streams(device: torch.device) -> Iterator[None]:
    """Put back the global random streams of torch, Python and numpy."""
    python, numpy = random.getstate(), np.random.get_state()
    device_type = device.type if is_accelerator(device) else "cuda"
    with torch.random.fork_rng(devices=[device] if is_accelerator(device) else [], device_type=device_type):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextmanager
def streams_from(seed: int | None, device: torch.device) -> Iterator[None]:
    """Let all of them begin from a seed, and put them back; None leaves them as they are."""
    if seed is None:
        yield
        return
    with streams(device):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        if is_accelerator(device):
            with runtime(device).device(device):
                runtime(device).manual_seed(seed)
        yield
