"""Options that trade memory for time: where parameters lie, and what of the activations is kept."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, cast

from lightning_sp.config.checks import Size, check_size
from lightning_sp.errors import SequenceParallelError, closest

# How blocks recompute themselves, those that are named the cheapest in time first.
CHECKPOINT_POLICIES = ("auto", "none", "every_<n>", "selective", "full")


def every_nth(policy: str) -> int | None:
    """Return n of the policy ``every_<n>``; None of another one."""
    found = re.fullmatch(r"every_([1-9]\d*)", policy)
    return int(found[1]) if found else None


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What each rank holds of a model and its activations; nothing of it changes a result.

    Args:
        shard_size: Ranks over which FSDP2 splits parameters; the rest of the world replicates. "auto": the whole world.
        activation_checkpointing: Which transformer blocks recompute their activations in the backward. "auto": as few as a step's predicted peak
            allows by `memory_budget_gib`; none while it fits. "none". "selective": all of them, but
            never their attention and its communication. "every_<n>": so each n-th block, from the first on. "full": all of them with their
            attention, whose kernels and messages run twice. True is "selective", False is "none".
        memory_budget_gib: Memory of a rank that "auto" may fill, in GiB. "auto": nine tenths of the device's; on a CPU of the machine's, or of
            its cgroup's limit, divided by the ranks there. A budget that you give and nothing fits is refused; one by "auto" is warned of.

    Raises:
        SequenceParallelError: a value that the option does not take.
    """

    shard_size: Size = "auto"
    activation_checkpointing: bool | str = "auto"
    memory_budget_gib: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        check_size("shard_size", self.shard_size)
        _check_policy(self.activation_checkpointing)
        _check_budget(self.memory_budget_gib)
        if self.memory_budget_gib != "auto" and self.checkpoint_policy != "auto":
            raise SequenceParallelError(
                f"memory_budget_gib={self.memory_budget_gib} with activation_checkpointing={self.activation_checkpointing!r}: a budget is for "
                "activation_checkpointing='auto', which chooses by it; leave one of the two out"
            )

    @property
    def checkpoint_policy(self) -> str:
        """The policy of `activation_checkpointing` by its name."""
        given = self.activation_checkpointing
        return given if isinstance(given, str) else "selective" if given else "none"


def _check_budget(given: object) -> None:
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if given != "auto" and not (is_number and 0 < cast(float, given) < math.inf):
        raise SequenceParallelError(f"memory_budget_gib={given!r}: must be positive, in GiB for each rank, or 'auto'")


def _is_policy(name: str) -> bool:
    return every_nth(name) is not None or (name in CHECKPOINT_POLICIES and name.isalpha())


def _check_policy(given: object) -> None:
    if isinstance(given, bool) or (isinstance(given, str) and _is_policy(given)):
        return
    near = closest(given, (*CHECKPOINT_POLICIES, "every_2")) if isinstance(given, str) else ""
    raise SequenceParallelError(
        f"activation_checkpointing={given!r}: must be one of {', '.join(CHECKPOINT_POLICIES)} with n a positive integer, or True (selective) or "
        f"False (none){near}"
    )
