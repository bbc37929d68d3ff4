"""An evaluation step on a crop, whole as one device runs it, and on a rank's part: what it logs, returns and keeps. Without a trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from lightning_sp import comm
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize import failing_together, without_tiles
from lightning_sp.preflight.comparison import has_16_bit_weights
from lightning_sp.preflight.crops.both_runs import both_runs, untouched_run
from lightning_sp.preflight.crops.crop import Crop
from lightning_sp.preflight.crops.shorter import RunStep, ShorterRun, shorter_run, shorter_run_of_text
from lightning_sp.preflight.differences.decisions import (
    HIDDEN,
    OF_PARTS,
    Effect,
    effect_of_error,
    lines_of_ranks,
    search_lines,
)
from lightning_sp.preflight.differences.other_tokens import CropCalls, modules_of_other_tokens
from lightning_sp.preflight.evaluation.output_kinds import returned_and_kept
from lightning_sp.preflight.evaluation.outputs import leaves, output_differences
from lightning_sp.preflight.evaluation.rounded_outputs import but_for_rounding, unlike
from lightning_sp.preflight.explain.verdict import TOLERANCES
from lightning_sp.preflight.moved_weights import moved_weights
from lightning_sp.preflight.numbers import RankNumbers
from lightning_sp.preflight.recording.hidden_terms import Call
from lightning_sp.preflight.recording.logged import Number, recorded_numbers
from lightning_sp.preflight.recording.numbers_read.forced_numbers import Forced, forcing
from lightning_sp.preflight.recording.numbers_read.lines_of_parts import Line, numbers_of_parts
from lightning_sp.preflight.recording.numbers_read.read_numbers import ReadNumbers, numbers_read
from lightning_sp.preflight.recording.token_outcomes import Other, TokenOutcomes, Tokens
from lightning_sp.preflight.recording.watch import AttentionCall
from lightning_sp.preflight.rounded_numbers import with_moves
from lightning_sp.preflight.trial import SEED, alone, attention_calls, together
from lightning_sp.step.isolation.snapshot import isolated
from lightning_sp.step.results.kept_values import KeptValues
from lightning_sp.step.results.output_structure import Kinds, Leaf, leaves_of, shapes_of
from lightning_sp.step.runner import StepRunner

# By how many roundings of a weight one device's own runs have it moved.
_ROUNDINGS = 4.0
NOTHING_TURNED: Mapping[Call, Other] = MappingProxyType({})


class WholeOutput(Protocol):
    """Makes what a step on shards gave whole."""

    def __call__(self, output: Any, of: str) -> Any:
        """Return an output with whole sequences; `of` says in words what it is. Every rank must call it."""


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
        read: numbers of the batch that it compares or reads.
        token_outcomes: calls that are to be shown with others.
    """

    numbers: Mapping[str, Number]
    again: Mapping[str, Number]
    outputs: list[Leaf]
    other: list[Leaf]
    kept: list[Leaf]
    kept_again: list[Leaf]
    read: ReadNumbers
    token_outcomes: Mapping[Call, Other]


@dataclass(frozen=True, kw_only=True)
class PartRun:
    """What a step shows of a rank's part of the same crop.

    Args:
        numbers: of both runs.
        outputs: what differs of a prediction, in words; empty for nothing.
        kept: likewise, of what is kept for later.
        keeps: whether a rank keeps something.
        read: numbers of its part that it compares or reads.
        kinds: of what its outputs, where they count, and what it keeps are made.
        token_outcomes: calls that give outcomes of tokens.
    """

    numbers: RankNumbers
    outputs: str
    kept: str
    keeps: bool
    read: dict[Line, int]
    kinds: Kinds
    token_outcomes: Mapping[Call, Other]


def find_others(own: Crop, runner: StepRunner, run: RunStep, options: ShardOptions) -> None:
    """Note what attends to other tokens, images say: before the first training step, or without one, it is known by this alone."""
    _, sharded = both_runs(own, own, options, runner.context.mesh, runner.device)
    if sharded.info.other_inputs and not runner.context.unsharded.known:
        with together():
            others = modules_of_other_tokens(_calls(own, runner, run, options))
        if others is not None:
            runner.context.unsharded.set(*others)


def run_whole(
    own: Crop,
    runner: StepRunner,
    run: RunStep,
    options: ShardOptions,
    *,
    name: str,
    predicts: bool,
    turned: Mapping[Call, Other] = NOTHING_TURNED,
) -> WholeRun:
    """Run a step on this rank's group's crop as one device would, twice. Every rank must call it."""
    shown = partial(_shown, own, runner, run, options, name=name, predicts=predicts, turned=turned)
    # Of numbers a time is told by two equal runs, of predictions what is drawn by two seeds.
    first, again = shown(SEED), shown(SEED + 1 if predicts else SEED)
    return WholeRun(
        numbers=first.numbers,
        again=again.numbers,
        outputs=first.outputs,
        other=again.outputs,
        kept=first.kept,
        kept_again=again.kept,
        read=first.read,
        token_outcomes=first.token_outcomes,
    )


class _Shown(NamedTuple):
    """What one run of a whole crop shows; as of `WholeRun`."""

    numbers: Mapping[str, Number]
    outputs: list[Leaf]
    kept: list[Leaf]
    read: ReadNumbers
    token_outcomes: Mapping[Call, Other]


def _shown(
    own: Crop,
    runner: StepRunner,
    run: RunStep,
    options: ShardOptions,
    seed: int,
    *,
    name: str,
    predicts: bool,
    forced: Forced | None = None,
    turned: Mapping[Call, Other] = NOTHING_TURNED,
) -> _Shown:
    mesh, module, world = runner.context.mesh, runner.module, runner.groups.world
    part, before = untouched_run(own.batch, options, runner.device), KeptValues(module)
    with (
        together(),
        alone(module, runner.context, part.info, device=runner.device, uneven=own.uneven_entries, seed=seed),
        recorded_numbers(module) as found,
    ):
        tokens = Tokens.of_part(part.info, mesh.layout, None)
        with (
            TokenOutcomes(tokens, turned) as outcomes,
            numbers_read(module, runner.context, name) as read,
            forcing(forced, module),
        ):
            output = run(part.batch, part.info)
        found.returned(output)
        found.attributes(module, world, evaluates=True)
        found.metrics(module, mesh.data_group, world, mesh.token_group)
        outputs, kept = leaves(output) if predicts else [], leaves(before.new())
    runner.end_without_backward()
    return _Shown(found.numbers, outputs, kept, read, outcomes.found)


def decision_of_part(
    own: Crop,
    runner: StepRunner,
    run: RunStep,
    options: ShardOptions,
    whole: WholeRun,
    part: PartRun,
    *,
    name: str,
    predicts: bool,
) -> SequenceParallelError | None:
    """Return a refusal of a step that decides what it shows by a number of its part, at a line of the user's. Every rank must call it."""
    world = runner.groups.world
    lines = {each: n for each, n in lines_of_ranks(part.read, world).items() if not each.is_installed}
    if hidden := [line.describe() for line in lines if line.is_hidden]:
        return SequenceParallelError(f"preflight: {name} {HIDDEN.format(lines=' and '.join(hidden[:2]))}")
    differ = partial(output_differences, tolerance=TOLERANCES[torch.float32])

    def effect(forced: Forced) -> Effect:
        try:
            numbers, outputs, kept, *_ = _shown(
                own,
                runner,
                run,
                options,
                SEED,
                name=name,
                predicts=predicts,
                forced=forced.of_run(whole.read.num_calls),
            )
        except Exception as error:
            return effect_of_error(error, world)
        steady = {n: each.value for n, each in whole.numbers.items() if _is_close(each, whole.again.get(n))}
        differs = numbers.keys() != whole.numbers.keys() or any(
            not _is_close(numbers[n], whole.numbers[n]) for n in steady
        )
        differs = differs or bool([*differ(outputs, whole.outputs, whole.other)])
        differs = differs or bool([*differ(kept, whole.kept, whole.kept_again)])
        return Effect.OTHER if any(comm.gather_objects(differs, world)) else Effect.NONE

    def refusal(found: list[Line], what: Effect, larger: bool) -> SequenceParallelError:
        does = (
            "it shows something else" if what is Effect.OTHER else "it fails, so that nobody can tell what it decides,"
        )
        return SequenceParallelError(
            f"preflight: {name} decides by a number of its tokens, at {found[-1].describe()}: on a crop of {own.rows} x {own.tokens} tokens "
            f"{does} where that number is {'larger' if larger else 'smaller'}. {OF_PARTS}"
        )

    try:
        search_lines(lines, effect, refusal)
    except SequenceParallelError as error:
        return error
    return None


def _is_close(one: Number, other: Number | None) -> bool:
    return other is not None and (
        math.isclose(one.value, other.value, rel_tol=1e-6) or (math.isnan(one.value) and math.isnan(other.value))
    )


def run_part(
    own: Crop,
    runner: StepRunner,
    run: RunStep,
    options: ShardOptions,
    whole: WholeRun,
    whole_output: WholeOutput,
    *,
    name: str,
    predicts: bool,
    turned: Mapping[Call, Other] = NOTHING_TURNED,
) -> PartRun:
    """Run a step on this rank's part; say in words what differs of what it returns, where that counts, and keeps. Every rank must call it."""
    mesh, module, world = runner.context.mesh, runner.module, runner.groups.world
    _, sharded = both_runs(own, own, options, mesh, runner.device)
    before = KeptValues(module)
    draws = runner.context.drawn_from(SEED)  # in the global view what one device has drawn
    with together(), isolated(module, runner.device), draws, recorded_numbers(module) as found:
        tokens = Tokens.of_part(sharded.info, sharded.info.layout, mesh.sequence_rank)
        with (
            failing_together(module),
            without_tiles(module) if turned else nullcontext(),  # each call as often as a whole run makes it
            TokenOutcomes(tokens, turned, follows=True) as outcomes,
            numbers_read(module, runner.context, name) as read,
        ):
            output = runner.evaluate(sharded.info, lambda: run(sharded.batch, sharded.info))
        found.returned(output)
        found.attributes(module, world, evaluates=True)
        alike = mesh.data_group if runner.context.global_view else None
        found.metrics(module, alike, world, mesh.token_group)
        _learn_tokens(runner, f"{name} returns", whole.outputs, output, sharded.info)
        _learn_tokens(runner, f"{name} keeps", whole.kept, before.new(), sharded.info)
        kinds = returned_and_kept(output if predicts else None, before)
        shown = leaves(whole_output(output, f"{name} returns")) if predicts else []
        keeps = any(comm.gather_objects(bool(before.new()), world))
        kept, why = _whole_values(before, whole_output, f"{name} keeps") if keeps else ([], "")
    moved = partial(_moved, own, runner, run, options, name=name, predicts=predicts, turned=turned)
    differ = [unlike(module, shown, whole.outputs, whole.other), unlike(module, kept, whole.kept, whole.kept_again)]
    outputs, kept_otherwise = but_for_rounding(differ, moved, world)
    numbers = RankNumbers(mesh.sequence_rank, whole.numbers, whole.again, found.numbers, has_16_bit_weights(module))
    again = partial(_shown, own, runner, run, options, SEED, name=name, predicts=predicts, turned=turned)
    return PartRun(
        numbers=with_moves(numbers, module, lambda: again().numbers, world),
        outputs=outputs,
        kept=why or kept_otherwise,
        keeps=keeps,
        read={} if runner.context.global_view else numbers_of_parts(whole.read, read, 1),
        kinds=kinds,
        token_outcomes=outcomes.found,
    )


def _moved(
    own: Crop, runner: StepRunner, run: RunStep, options: ShardOptions, seed: int, **shown: Any
) -> tuple[list[Leaf], list[Leaf]]:
    """Return what a whole crop gives, and keeps, with weights that are moved by rounding. Every rank must call it."""
    eps = max(torch.finfo(each.dtype).eps for each in runner.module.parameters() if each.is_floating_point())
    with moved_weights(runner.module, seed, _ROUNDINGS * eps):
        _, outputs, kept, *_ = _shown(own, runner, run, options, SEED, **shown)
    return outputs, kept


def _learn_tokens(runner: StepRunner, of: str, whole: list[Leaf], part: Any, batch: SequenceInfo) -> None:
    """Note which tensors have tokens, from what a step gave of a whole crop and of this rank's part."""
    if not runner.context.global_view:
        lengths = [each.part_and_whole for each in batch.all_sequences]
        runner.context.token_outputs.compare(of, shapes_of(whole), shapes_of(leaves_of(part)), lengths)


def _whole_values(kept: KeptValues, whole_output: WholeOutput, of: str) -> tuple[list[Leaf], str]:
    """Return what a step keeps with whole sequences, or why it cannot be made whole. Every rank must call it."""
    try:
        kept.replace(partial(whole_output, of=of))
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
