"""An evaluation step on a crop, whole as one device runs it, and on a rank's part: what it logs, returns and keeps. Without a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from lightning_sp import comm
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize import failing_together
from lightning_sp.preflight.comparison import has_16_bit_weights
from lightning_sp.preflight.crops.both_runs import both_runs, untouched_run
from lightning_sp.preflight.crops.crop import Crop
from lightning_sp.preflight.crops.shorter import RunStep, ShorterRun, shorter_run, shorter_run_of_text
from lightning_sp.preflight.differences.other_tokens import CropCalls, modules_of_other_tokens
from lightning_sp.preflight.evaluation.outputs import leaves, output_differences
from lightning_sp.preflight.explain.verdict import TOLERANCES
from lightning_sp.preflight.numbers import RankNumbers
from lightning_sp.preflight.recording.logged import Number, recorded_numbers
from lightning_sp.preflight.recording.watch import AttentionCall
from lightning_sp.preflight.trial import SEED, alone, attention_calls, together
from lightning_sp.step.isolation import isolated
from lightning_sp.step.results.kept_values import KeptValues
from lightning_sp.step.runner import StepRunner


class WholeOutput(Protocol):
    """Makes what a step on shards gave whole."""

    def __call__(self, output: Any, does: str = ...) -> Any:
        """Return an output with whole sequences; `does` says what the step does with it, in a message. Every rank must call it."""


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """What a step shows of a whole crop of this rank's group.

    Args:
        numbers: that it logs.
        again: likewise, of another run.
        outputs: of a prediction.
        other: likewise, of a run with another seed.
        kept: for later.
        kept_again: likewise, of the other run.
    """

    numbers: Mapping[str, Number]
    again: Mapping[str, Number]
    outputs: list[Any]
    other: list[Any]
    kept: list[Any]
    kept_again: list[Any]


@dataclass(frozen=True, kw_only=True)
class PartRun:
    """What a step shows of a rank's part of the same crop.

    Args:
        numbers: of both runs.
        outputs: what differs of a prediction, in words; empty for nothing.
        kept: likewise, of what is kept for later.
        keeps: whether a rank keeps something.
    """

    numbers: RankNumbers
    outputs: str
    kept: str
    keeps: bool


def find_others(own: Crop, runner: StepRunner, run: RunStep, options: ShardOptions) -> None:
    """Note what attends to other tokens, images say: before the first training step, or without one, it is known by this alone."""
    _, sharded = both_runs(own, own, options, runner.context.mesh, runner.device)
    if sharded.info.other_inputs and not runner.context.unsharded.known:
        with together():
            others = modules_of_other_tokens(_calls(own, runner, run, options))
        if others is not None:
            runner.context.unsharded.set(*others)


def run_whole(own: Crop, runner: StepRunner, run: RunStep, options: ShardOptions, *, predicts: bool) -> WholeRun:
    """Run a step on this rank's group's crop as one device would, twice. Every rank must call it."""
    mesh, module, world = runner.context.mesh, runner.module, runner.groups.world

    def shown(seed: int) -> tuple[Mapping[str, Number], list[Any], list[Any]]:
        part, before = untouched_run(own.batch, options, runner.device), KeptValues(module)
        with (
            together(),
            alone(module, runner.context, part.info, device=runner.device, uneven=own.uneven_entries, seed=seed),
            recorded_numbers(module) as found,
        ):
            output = run(part.batch, part.info)
            found.returned(output)
            found.attributes(module, world, evaluates=True)
            found.metrics(module, mesh.data_group, world, mesh.token_group)
            outputs, kept = leaves(output) if predicts else [], leaves(before.new())
        runner.end_without_backward()
        return found.numbers, outputs, kept

    # Of numbers a time is told by two equal runs, of predictions what is drawn by two seeds.
    (numbers, outputs, kept), (again, other, kept_again) = shown(SEED), shown(SEED + 1 if predicts else SEED)
    return WholeRun(numbers=numbers, again=again, outputs=outputs, other=other, kept=kept, kept_again=kept_again)


def run_part(
    own: Crop,
    runner: StepRunner,
    run: RunStep,
    options: ShardOptions,
    whole: WholeRun,
    whole_output: WholeOutput,
    *,
    predicts: bool,
) -> PartRun:
    """Run a step on this rank's part; say in words what differs of what it returns, where that counts, and keeps. Every rank must call it."""
    mesh, module, world = runner.context.mesh, runner.module, runner.groups.world
    _, sharded = both_runs(own, own, options, mesh, runner.device)
    before = KeptValues(module)
    draws = runner.context.drawn_from(SEED)  # in the global view what one device has drawn
    with together(), isolated(module, runner.device), draws, recorded_numbers(module) as found:
        with failing_together(module):
            output = runner.evaluate(sharded.info, lambda: run(sharded.batch, sharded.info), filler=False)
        found.returned(output)
        found.attributes(module, world, evaluates=True)
        alike = mesh.data_group if runner.context.global_view else None
        found.metrics(module, alike, world, mesh.token_group)
        shown = leaves(whole_output(output)) if predicts else []
        keeps = any(comm.gather_objects(bool(before.new()), world))
        kept, why = _whole_values(before, whole_output) if keeps else ([], "")
    in_16_bits = has_16_bit_weights(module)
    tolerance = TOLERANCES[torch.bfloat16 if in_16_bits else torch.float32]
    compared = partial(output_differences, tolerance=tolerance, in_16_bits=in_16_bits)
    return PartRun(
        numbers=RankNumbers(mesh.sequence_rank, whole.numbers, whole.again, found.numbers, in_16_bits),
        outputs="; ".join(compared(shown, whole.outputs, whole.other)),
        kept=why or "; ".join(compared(kept, whole.kept, whole.kept_again)),
        keeps=keeps,
    )


def _whole_values(kept: KeptValues, whole_output: WholeOutput) -> tuple[list[Any], str]:
    """Return what a step keeps with whole sequences, or why it cannot be made whole. Every rank must call it."""
    try:
        kept.replace(partial(whole_output, does="it keeps"))
    except SequenceParallelError as error:
        return [], str(error)
    return leaves(kept.new()), ""


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
        lengths=[tuple(each.length for each in batch.all_sequences) for batch in batches],
    )
