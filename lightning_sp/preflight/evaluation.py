"""The first batch of an evaluation: a crop of it through the user's own step, whole and sharded, and what it shows compared.

Of validation and test the numbers, of a prediction what the step returns. Autocast is switched off meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sp import comm
from lightning_sp.config import StrategyConfig
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.data.batch.sharded_batch import is_sharded
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.comparison import has_16_bit_weights
from lightning_sp.preflight.crops.both_runs import both_runs, untouched_run
from lightning_sp.preflight.crops.crop import Crop
from lightning_sp.preflight.crops.shared_crop import shared_crop
from lightning_sp.preflight.crops.shorter import RunStep, ShorterRun, shorter_run, shorter_run_of_text
from lightning_sp.preflight.explain.verdict import TOLERANCES
from lightning_sp.preflight.numbers import RankNumbers, counted_once, described, differences
from lightning_sp.preflight.other_tokens import CropCalls, modules_of_other_tokens
from lightning_sp.preflight.outputs import leaves, output_differences, refuse_differences
from lightning_sp.preflight.recording.logged import Number, recorded_numbers
from lightning_sp.preflight.recording.watch import AttentionCall
from lightning_sp.preflight.trial import SEED, alone, attention_calls, together
from lightning_sp.step.isolation import isolated
from lightning_sp.step.runner import StepRunner

InFloat32 = Callable[[], AbstractContextManager[None]]
# Gives what a step on shards returned with whole sequences. Every rank must call it.
WholeOutput = Callable[[Any], Any]


class NotComparedError(SequenceParallelError):
    """An evaluation step does not run on a crop.

    Args:
        message: why.
        of_part: whether it runs whole, and not sharded.
        of_numbers: whether it runs, and shows other numbers, by which nothing is decided.
    """

    def __init__(self, message: str, *, of_part: bool = True, of_numbers: bool = False) -> None:
        super().__init__(message)
        self.of_part, self.of_numbers = of_part, of_numbers


@dataclass(frozen=True)
class FirstOfLoader:
    """The first batch of an evaluation loader, as that gave it; a loader is the step's name and its number."""

    batch: Any
    loader: tuple[str, int]


def compare_evaluation(
    batch: Any,
    runner: StepRunner,
    run: RunStep,
    *,
    name: str,
    config: StrategyConfig,
    options: ShardOptions,
    monitored: Collection[str],
    whole_output: WholeOutput | None = None,
    strict: bool = False,
) -> None:
    """Compare what an evaluation step shows on a crop of the batch, whole and sharded; it leaves no trace. Every rank must call it.

    Args:
        batch: as the loader gave it.
        runner: of the model's steps.
        run: the user's step on a batch.
        name: of the step.
        config: how long a crop is wanted.
        options: which tensors carry the sequence.
        monitored: names of numbers that decide about the run.
        whole_output: of a step whose output is what counts, a prediction's.
        strict: other numbers are raised, and not only warned of, by which nothing is decided.

    Raises:
        NotComparedError: one of them does not run; or shows other numbers, where that is `strict`.
        SequenceParallelError: a monitored number, or an output that counts, is not that of one device.
    """
    mesh, patterns, ran_whole = runner.context.mesh, runner.context.last_attention_patterns, False
    try:
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            crop, own = shared_crop(
                batch,
                options,
                mesh.layout,
                wanted=None if config.preflight_tokens == "auto" else config.preflight_tokens,
                hand_sharded=not config.shard_batch or is_sharded(batch),
                data_parallel_rank=mesh.data_parallel_rank,
                sample_rank=mesh.sample_rank,
                sequence_group=runner.groups.sequence,
                control_group=runner.groups.world,
            )
            _find_others(own, runner, run, options)
            whole = _of_whole(own, runner, run, options, predicts=whole_output is not None)
            ran_whole = True
            found, outputs = _of_part(own, runner, run, options, whole, whole_output)
    except (
        Exception
    ) as error:  # on all ranks: what is wrong with the step itself, and not with a crop, it will say itself
        raise _not_compared(name, error, ran_whole) from error
    finally:
        runner.end_without_backward()
        runner.context.last_attention_patterns = patterns
    of_ranks: list[RankNumbers] = comm.gather_objects(found, runner.groups.world)
    runner.context.logged_once.setdefault(name, {}).update(counted_once(of_ranks))
    step = f"{name} on a crop of {own.rows} x {crop.tokens} tokens"
    if differ := differences(of_ranks):
        _tell(described(differ, step, monitored), strict)
    refuse_differences(comm.gather_objects(outputs, runner.groups.world), step)


def _not_compared(name: str, error: Exception, ran_whole: bool) -> NotComparedError:
    why = f"preflight: {name} was not compared with one device: {type(error).__name__}: {error}"
    return NotComparedError(why, of_part=ran_whole and not comm.is_of_communication(error))


def _tell(text: str, strict: bool) -> None:
    if strict:
        raise NotComparedError(text, of_numbers=True)
    rank_zero_warn(text)


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """What a step shows of a whole crop of this rank's group.

    Args:
        numbers: that it logs.
        again: likewise, of another run.
        outputs: of a prediction.
        other: likewise, of a run with another seed.
    """

    numbers: Mapping[str, Number]
    again: Mapping[str, Number]
    outputs: list[Any]
    other: list[Any]


def _find_others(own: Crop, runner: StepRunner, run: RunStep, options: ShardOptions) -> None:
    """Before the first training step, or without one, what attends to images, say, is known by this alone."""
    _, sharded = both_runs(own, own, options, runner.context.mesh, runner.device)
    if sharded.info.other_inputs and not runner.context.unsharded.known:
        with together():
            others = modules_of_other_tokens(_calls(own, runner, run, options))
        if others is not None:
            runner.context.unsharded.set(*others)


def _of_whole(own: Crop, runner: StepRunner, run: RunStep, options: ShardOptions, *, predicts: bool) -> _Whole:
    mesh, module, world = runner.context.mesh, runner.module, runner.groups.world

    def shown(seed: int) -> tuple[Mapping[str, Number], list[Any]]:
        part = untouched_run(own.batch, options, runner.device)
        with (
            together(),
            alone(module, runner.context, part.info, device=runner.device, uneven=own.uneven_entries, seed=seed),
            recorded_numbers(module) as found,
        ):
            output = run(part.batch, part.info)
            found.returned(output)
            found.attributes(module)
            found.metrics(module, mesh.data_group, world, mesh.token_group)
            kept = leaves(output) if predicts else []
        runner.end_without_backward()
        return found.numbers, kept

    # Of numbers a time is told by two equal runs, of predictions what is drawn by two seeds.
    (numbers, outputs), (again, other) = shown(SEED), shown(SEED + 1 if predicts else SEED)
    return _Whole(numbers=numbers, again=again, outputs=outputs, other=other)


def _of_part(
    own: Crop,
    runner: StepRunner,
    run: RunStep,
    options: ShardOptions,
    whole: _Whole,
    whole_output: WholeOutput | None,
) -> tuple[RankNumbers, str]:
    """Return the numbers of both runs, and in words what differs of their outputs where these count."""
    mesh, module, world = runner.context.mesh, runner.module, runner.groups.world
    _, sharded = both_runs(own, own, options, mesh, runner.device)
    with together(), isolated(module, runner.device), recorded_numbers(module) as found:
        output = runner.evaluate(sharded.info, lambda: run(sharded.batch, sharded.info), filler=False)
        found.returned(output)
        found.attributes(module)
        found.metrics(module, None, world, mesh.token_group)
        shown = [] if whole_output is None else leaves(whole_output(output))
    in_16_bits = has_16_bit_weights(module)
    tolerance = TOLERANCES[torch.bfloat16 if in_16_bits else torch.float32]
    differ = output_differences(shown, whole.outputs, whole.other, tolerance=tolerance, in_16_bits=in_16_bits)
    return RankNumbers(mesh.sequence_rank, whole.numbers, whole.again, found.numbers, in_16_bits), "; ".join(differ)


def _calls(own: Crop, runner: StepRunner, run: RunStep, options: ShardOptions) -> CropCalls:
    """Return an evaluation step's attention calls on crops of this rank's group."""

    def calls(shorter: ShorterRun | None) -> tuple[AttentionCall, ...] | None:
        if shorter is None:
            return None
        uneven = own.uneven_entries
        return attention_calls(runner.module, runner.context, *shorter, device=runner.device, uneven=uneven)

    part = untouched_run(own.batch, options, runner.device)
    whole = calls((lambda: run(part.batch, part.info), part.info))
    less, text = (make(own, options, run, runner.device) for make in (shorter_run, shorter_run_of_text))
    shorter, is_text = calls(less), False
    if shorter is None:
        shorter, is_text = calls(text), True
    batches = [part.info] if less is None else [part.info, less[1]]
    return CropCalls(
        module=runner.module,
        crop=f"a crop of {own.rows} x {own.tokens} tokens",
        whole=whole or (),
        shorter=None if whole is None else shorter,
        is_text=is_text,
        lengths=[tuple(each.length for each in batch.sequences) for batch in batches],
    )


class FirstEvaluationBatches:
    """The first batch of each evaluation loader, kept until its step begins; a class because it waits for that.

    Args:
        config: of the strategy.
    """

    def __init__(self, config: StrategyConfig) -> None:
        self._config = config
        self._due = False
        self._compared: set[tuple[str, int]] = set()
        self._first: FirstOfLoader | None = None

    def expect(self, *, sharded: bool) -> None:
        """Begin a run, on parts of sequences or on whole ones."""
        self._due = self._config.preflight and sharded
        self._compared, self._first = set(), None

    def offer(self, batch: Any, loader: tuple[str, int]) -> None:
        """Remember a loader's first batch; the loader is the step's name, empty in training, and its number."""
        if self._due and loader[0] and loader not in self._compared:
            self._compared.add(loader)
            self._first = FirstOfLoader(batch, loader)

    @property
    def is_due(self) -> bool:
        """Whether the step in progress is to be compared before it runs."""
        return self._first is not None

    def take(self) -> FirstOfLoader:
        """Return the batch of the step in progress, once."""
        assert self._first is not None
        first, self._first = self._first, None
        return first

    def compare(
        self,
        first: FirstOfLoader,
        runner: StepRunner,
        run: RunStep,
        *,
        name: str,
        options: ShardOptions,
        monitored: Collection[str],
        in_float32: InFloat32 | None,
        whole_output: WholeOutput | None = None,
        strict: bool = False,
    ) -> None:
        """Compare the step in progress, as `compare_evaluation`; a later one of this loader where that was not possible.

        Args:
            first: the step's batch.
            runner: of the model's steps.
            run: the user's step on a batch.
            name: of the step.
            options: which tensors carry the sequence.
            monitored: names of numbers that decide about the run.
            in_float32: switches autocast off; None where there is none.
            whole_output: of a step whose output is what counts.
            strict: as of `compare_evaluation`.
        """
        try:
            with nullcontext() if in_float32 is None else in_float32():
                compare_evaluation(
                    first.batch,
                    runner,
                    run,
                    name=name,
                    config=self._config,
                    options=options,
                    monitored=monitored,
                    whole_output=whole_output,
                    strict=strict,
                )
        except NotComparedError as error:
            if not error.of_numbers:
                self._compared.discard(first.loader)
            raise
        self._compared.add(first.loader)
