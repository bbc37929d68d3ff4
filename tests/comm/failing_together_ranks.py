"""What each rank runs in test_failing_together.py: plain collectives, some of which a rank does not reach."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as _c10d

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError

PAIRS = ((0, 1), (2, 3))


def told(calls: str, failing: dict[int, int]) -> str:
    """Return what ended this rank, empty for nothing; then prove that its groups still work.

    Args:
        calls: which group each collective is of, one after the other: "w" the world, "p" this rank's pair.
        failing: which ranks fail by themselves, before the how many-th of them.
    """
    pair = comm.group_of(PAIRS[: dist.get_world_size() // 2])
    said = ""
    try:
        with comm.failing_together():
            for number, call in enumerate(calls):
                if failing.get(dist.get_rank()) == number:
                    raise ArithmeticError("my own")
                comm.reduce_sum(torch.ones(1), pair if call == "p" else None)
            if failing.get(dist.get_rank()) == len(calls):
                raise ArithmeticError("my own")
    except (ArithmeticError, comm.PeerError) as error:
        said = type(error).__name__
    assert comm.reduce_sum(torch.ones(1), pair).item() == 2
    assert comm.reduce_sum(torch.ones(1)).item() == dist.get_world_size()
    return said


def apart(call: str) -> str:
    """Return what a rank is told where rank 1 comes to another collective than the others; then prove that the groups still work.

    Args:
        call: what rank 1 does in place of the sum of one number: "shape", "kind", or "end" for nothing.
    """
    said = ""
    try:
        with comm.failing_together():
            comm.reduce_sum(torch.ones(3))
            if dist.get_rank() != 1:
                comm.reduce_sum(torch.ones(1))
            elif call == "shape":
                comm.reduce_sum(torch.ones(2))
            elif call == "kind":
                comm.gather_objects("one")
    except (SequenceParallelError, comm.PeerError) as error:
        said = f"{type(error).__name__}: {error}"
    assert comm.reduce_sum(torch.ones(1)).item() == dist.get_world_size()
    return said


def crossed(ways: tuple[str, ...]) -> str:
    """Return what a rank is told where ranks wait for each other in different groups; then prove that the groups still work.

    Args:
        ways: of each rank, which collectives it comes to, as in `told`.
    """
    pair = comm.group_of(PAIRS[: dist.get_world_size() // 2])
    said, store = "", _c10d._get_default_store()
    before = store.timeout
    store.set_timeout(timedelta(seconds=20))  # of a wait that nobody ends
    try:
        with comm.failing_together():
            for call in ways[dist.get_rank()]:
                comm.reduce_sum(torch.ones(1 if call == "p" else 2), pair if call == "p" else None)
    except (SequenceParallelError, comm.PeerError) as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        store.set_timeout(before)
    assert comm.reduce_sum(torch.ones(1), pair).item() == 2
    assert comm.reduce_sum(torch.ones(1)).item() == dist.get_world_size()
    return said
