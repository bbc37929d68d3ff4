"""Steps that decide by a result of an earlier one: the last loss, a metric that is logged. Both ways are compared before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.failing_steps import say_not_compared
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.recording.progress_read import ProgressRead, with_other_results
from lightning_sp.preflight.trial import Trial
from lightning_sp.users_code.ownership import plain_text


def compare_with_other_results(
    trial: Trial, whole: Outcome, read: ProgressRead, compare: Callable[[Trial], Any]
) -> None:
    """Compare once more what the step does as its results become small, and large, where that is something else. Every rank must call it.

    Args:
        trial: of the step.
        whole: what it gave whole.
        read: the results that it keeps, and the metrics that it reads.
        compare: runs a trial whole and sharded.

    Communicates: whether any rank's step keeps any; one whole run each way where it does, two where Python gets numbers.
    """
    if not any(comm.gather_objects(read.has_results, trial.control_group)):
        return
    for larger, plain in ways_to_show(trial, read):
        when = results_in_words(read, larger=larger)
        again = replace(trial, crop=f"{trial.crop} {when},")
        with with_other_results(trial.module, read, larger=larger, plain=plain):
            try:
                with torch.compiler.set_stance("force_eager"):
                    found = again.whole()
            except SequenceParallelError as error:
                say_not_compared(f"not compared {when}", error)
                continue
            if any(comm.gather_objects(does_otherwise(found, whole), trial.control_group)):
                compare(again)


def ways_to_show(trial: Trial, read: ProgressRead) -> list[tuple[bool, bool]]:
    """Return whether numbers are shown as large, and plain, in each run: so where Python gets some. Every rank must call it."""
    has_numbers = any(comm.gather_objects(bool(read.alike.numbers & read.alike.lines), trial.control_group))
    return [(larger, plain) for plain in (False, True)[: 1 + has_numbers] for larger in (False, True)]


def results_in_words(read: ProgressRead, *, larger: bool) -> str:
    """Return which results are shown, and as what."""
    names = [
        *dict.fromkeys(
            [plain_text(each.name) for each in read.results if each.name is not None] + sorted(read.metrics)
        ),
        *(f"what {line.rpartition('/')[2]} reads" for line in sorted(read.alike.lines)),
    ]
    return f"with {', '.join(names[:3]) or 'its results'} as if {'large' if larger else 'small'}"


def does_otherwise(found: Outcome, whole: Outcome) -> bool:
    """Return whether a whole run gave something else than another one, and something finite, or went other ways: it drew, or read numbers."""
    if found.loss is None or whole.loss is None:
        return found.loss is not whole.loss
    if not torch.isfinite(found.loss).all():
        return False
    if (found.draws, found.attention, found.hidden) != (whole.draws, whole.attention, whole.hidden):
        return True
    if found.read.calls.keys() != whole.read.calls.keys() or not _are_equal(found.buffers, whole.buffers):
        return True
    return not (torch.equal(found.loss.detach(), whole.loss.detach()) and _are_equal(found.gradients, whole.gradients))


def _are_equal(found: Mapping[str, Tensor | None], whole: Mapping[str, Tensor | None]) -> bool:
    pairs = [(each, whole.get(name)) for name, each in found.items()]
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
