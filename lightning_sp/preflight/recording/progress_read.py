"""What a step reads of how far its run is, and of learning rates, and what it counts: noted in a trial, and shown as later in the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.preflight.recording.alike_numbers import AlikeNumbers
from lightning_sp.preflight.recording.checked_indices import CheckedIndices
from lightning_sp.preflight.recording.kept_results import noting_results, results_shown
from lightning_sp.preflight.recording.numbers_read.tracked_numbers import of_results
from lightning_sp.preflight.recording.unheard import unheard
from lightning_sp.step.users_numbers.counters import Counter, counted_on, noting_counters
from lightning_sp.step.users_numbers.rates import extreme_moments, noted_rates, rates_as_at
from lightning_sp.step.users_numbers.results import NumbersOfHooks, Result
from lightning_sp.trainer.noted_remainders import Remainder
from lightning_sp.trainer.shown_metrics import noted_metrics
from lightning_sp.trainer.shown_progress import Moment, later_moments, remainder_moments, shown_progress


class ProgressRead(NamedTuple):
    """What a step reads, on this rank.

    Args:
        progress: names of the run's progress, and remainders taken of it.
        rates: names of what optimizers' groups and schedules hold.
        counters: its own.
        results: numbers that it leaves for later steps.
        metrics: names of the trainer's.
        remainders: taken of its counters, as they are shown later.
        alike: lines of it that read numbers which are alike on all ranks.
    """

    progress: set[str | Remainder]
    rates: set[str]
    counters: list[Counter]
    results: list[Result]
    metrics: set[str]
    remainders: set[Remainder]
    alike: AlikeNumbers

    @property
    def has_results(self) -> bool:
        """Whether it keeps numbers for later steps, or reads such that steps change: metrics, weights, losses."""
        return bool(self.results or self.metrics or self.alike.lines)

    def noting(self, run: Callable[[], Any], trainer: Any) -> Callable[[], Any]:
        """Return a step that notes what it counts and leaves: it is run on one batch."""
        return noting_results(noting_counters(run, trainer, self.counters), trainer, self.results)

    def without_reads(self, of_hooks: NumbersOfHooks) -> ProgressRead:
        """Return what hooks have left, lists of the step's, which are longer by now, and lines that it has not come to before.

        All else that the step reads and leaves the first trial has shown it as later.
        """
        self.alike.lines -= of_hooks.lines
        steps = self.results[len(of_hooks.results) :]
        own = {(id(each.owner), each.name) for each in steps}
        others = [each for each in of_hooks.results if (id(each.owner), each.name) not in own]
        others += [each for each in steps if isinstance(each.owner, (list, deque))]
        return ProgressRead(set(), set(), [*of_hooks.counters], others, set(), set(), self.alike)


@contextmanager
def progress_read(module: Any, of_hooks: NumbersOfHooks) -> Iterator[ProgressRead]:
    """Note what the user's code reads within.

    Args:
        module: of the run.
        of_hooks: what is known of numbers; more may be added.
    """
    with (
        shown_progress(module) as read,
        noted_rates(module.trainer) as rates,
        noted_metrics(module) as metrics,
        AlikeNumbers(module) as alike,
    ):
        yield ProgressRead(read, rates, list(of_hooks.counters), list(of_hooks.results), metrics, set(), alike)


@contextmanager
def with_other_results(module: Any, read: ProgressRead, *, larger: bool, plain: bool = False) -> Iterator[None]:
    """Show what a step keeps and reads as if it were small, or large, and put it back.

    Args:
        module: of the run.
        read: by its step.
        larger: whether it is shown as large.
        plain: what it reads is so itself, where Python gets it; what it keeps stays.
    """
    budget = of_results(larger=larger, plain=plain)
    with (
        unheard(module.trainer),
        CheckedIndices() if plain else results_shown(module, read.results, read.metrics, budget),
        AlikeNumbers(module, budget, read.alike.often),
    ):
        yield


def shown_later(
    module: Any, found: ProgressRead, control_group: ProcessGroup | None
) -> Iterator[Callable[[], AbstractContextManager[str]]]:
    """Yield what shows the step each moment that it is to be tried at, and says which that is; nothing where no rank's reads or counts.

    Args:
        module: of the run.
        found: what was read on this rank.
        control_group: the world, on a backend for host objects. Every rank must call it.
    """
    taken = [each for each in found.progress if isinstance(each, Remainder)]
    own = bool(found.progress or found.rates or found.counters), bool(found.rates), taken
    due, rated, remainders = zip(*comm.gather_objects(own, control_group), strict=True)
    reads_rates = any(rated)
    if not any(due):
        return
    moments = [*later_moments(module.trainer), *(extreme_moments(module) if reads_rates else ())]
    moments += remainder_moments(module.trainer, {each for of_rank in remainders for each in of_rank}, moments)
    for number, moment in enumerate(dict.fromkeys(moments)):
        rates = partial(rates_as_at, module, moment, number) if reads_rates else None
        yield partial(_as_at, module, moment, found, rates)


def shown_at_remainders(
    module: Any, found: ProgressRead, control_group: ProcessGroup | None
) -> Iterator[Callable[[], AbstractContextManager[str]]]:
    """Yield what shows the step each moment at which a remainder of its counters is what it asks for. As `shown_later`, which comes before."""
    remainders = set().union(*comm.gather_objects(found.remainders, control_group))
    for moment in dict.fromkeys(remainder_moments(module.trainer, remainders, ())):
        yield partial(_as_at, module, moment, found, None)


@contextmanager
def _as_at(module: Any, moment: Moment, found: ProgressRead, rates: Any) -> Iterator[str]:
    trainer, batches = module.trainer, moment.batches
    with ExitStack() as stack:
        stack.enter_context(shown_progress(module, moment))
        if batches is None:
            batches = (moment.step - trainer.global_step) * trainer.accumulate_grad_batches
        counted = stack.enter_context(counted_on(found.counters, batches, found.remainders))
        shown = [counted, stack.enter_context(rates()) if rates else ""]
        also = ", ".join(filter(None, shown))
        yield f"{moment.describe()}{also and f' ({also})'}"
