"""Which modules attend to tokens that are not the sequence's: their numbers do not follow the length of the crop.

a module's call                    whole crop     shorter crop
queries and keys follow            64 x 64        48 x 48         the sequence's: on shards
neither follows                    17 x 17        17 x 17         a tower of images, say: whole on every rank
                                                  no call         likewise, where the shorter crop had to leave out the images
the queries alone follow           64 x 17        48 x 17         cross attention to it: each rank's queries over the whole
the keys alone follow              8 x 64         8 x 48          refused: each rank would see its own keys
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.errors import SequenceParallelError
from lightning_sp.preflight.comparison import plain_name
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.recording.watch import AttentionCall
from lightning_sp.preflight.trial import Trial
from lightning_sp.rewrite import num_virtual_tokens

_OWN, _OTHER, _QUERIES, _KEYS = (True, True), (False, False), (True, False), (False, True)


class OtherTokens(NamedTuple):
    """Modules that run whole on every rank, towers; and cross attention to them, of each rank's own queries."""

    whole: list[nn.Module]
    crossing: list[nn.Module]


@dataclass(frozen=True, kw_only=True)
class CropCalls:
    """The attention calls of a step on whole crops.

    Args:
        module: the sharded module.
        crop: the longer crop, in words.
        whole: calls on it.
        shorter: calls on the shorter one; None where there is none, or the step fails on it.
        is_text: images, videos and sounds had to be left out of the shorter one.
        lengths: tokens of each sequence, on both; nothing of the shorter one where there is none.
    """

    module: nn.Module
    crop: str
    whole: Sequence[AttentionCall]
    shorter: Sequence[AttentionCall] | None
    is_text: bool
    lengths: list[tuple[int, ...]]


def modules_of_training(trial: Trial, whole: Outcome) -> OtherTokens | None:
    """Return the modules of other tokens of a training step, whose whole run has been, and of steps tried before. None where nothing is known.

    Raises:
        SequenceParallelError: as `modules_of_other_tokens`.
    """
    shorter, is_text = trial.attention_of_shorter(), False
    if shorter is None:
        shorter, is_text = trial.attention_of_shorter(text_alone=True), True
    batches = [trial.batch] if trial.shorter is None else [trial.batch, trial.shorter[1]]
    calls = CropCalls(
        module=trial.module,
        crop=trial.crop,
        whole=whole.attention,
        shorter=shorter,
        is_text=is_text,
        lengths=[_lengths(batch, [*whole.read.sizes.values()], num_virtual_tokens(trial.module)) for batch in batches],
    )
    told = trial.context.unsharded.told
    known = None if told is None or told[0] is None else OtherTokens([*told[0]], [*told[1]])
    return with_those_known(modules_of_other_tokens(calls), known, calls)


def _lengths(batch: SequenceInfo, handed: Sequence[tuple[int, ...]], virtual_tokens: int) -> tuple[int, ...]:
    """Return the tokens of each sequence of a batch; of one that a hook has cut shorter, what it has left.

    Args:
        batch: before its hooks.
        handed: sizes of the tensors that the step was given on the longer crop.
        virtual_tokens: that the model puts before those.
    """
    lengths = tuple(each.length for each in batch.all_sequences)
    left = max((size[1] for size in handed if len(size) > 1 and size[0] == batch.rows), default=0)
    return (min(lengths[0], left + virtual_tokens),) if len(lengths) == 1 and left else lengths


def modules_of_other_tokens(calls: CropCalls) -> OtherTokens | None:
    """Return the modules that attend to tokens which are not the sequence's. None where nothing is known.

    Raises:
        SequenceParallelError: a module attends to both kinds of tokens, or from other tokens to the sequence.
    """
    shorter, lengths = calls.shorter, calls.lengths
    if shorter is None or len(lengths) < 2:
        return None
    kinds: dict[str, set[tuple[bool, bool]]] = defaultdict(set)
    for name, pairs in _by_module(calls.whole, shorter).items():
        for one, other in pairs:
            kinds[name].add((_follows(one.queries, other.queries, lengths), _follows(one.keys, other.keys, lengths)))
    if calls.is_text:
        # What text alone does not call attends to what was left out, unless it reads the text too.
        called = {each.module for each in shorter}
        for call in calls.whole:
            if call.module not in called and not {call.queries, call.keys}.intersection(lengths[0]):
                kinds[call.module].add(_OTHER)
    found = {name: each for name, each in kinds.items() if each != {_OWN}}
    for name, each in found.items():
        if len(each) > 1 or each == {_KEYS} or not name:
            numbers = ", ".join(f"{call.queries} x {call.keys}" for call in calls.whole if call.module == name)
            why = (
                "attends to the sequence and to other tokens"
                if len(each) > 1
                else "attends from other tokens to the sequence"
            )
            raise SequenceParallelError(
                f"preflight: {name or 'training_step'} {why if name else 'attends to other tokens'} (queries x keys on {calls.crop}: "
                f"{numbers}): on shards the two cannot be told apart, or each rank would see its own keys; give each attention a module of its "
                "own, whose queries are the sequence's, or keep it out of the step"
            )
    own = {name for name, each in kinds.items() if each == {_OWN}}
    modules = {plain_name(name): module for name, module in calls.module.named_modules()}
    towers = {_tower(name, own) for name, kind in found.items() if kind == {_OTHER}}
    crossing = {name for name, kind in found.items() if kind == {_QUERIES}}
    return OtherTokens(whole=[modules[n] for n in sorted(towers)], crossing=[modules[n] for n in sorted(crossing)])


def with_those_known(found: OtherTokens | None, known: OtherTokens | None, calls: CropCalls) -> OtherTokens | None:
    """Return modules of other tokens with those of earlier trials that this step has not called: a batch of text alone calls no tower.

    Args:
        found: of this step; None where nothing is known of it.
        known: of earlier ones; likewise.
        calls: of this step.
    """
    if found is None or known is None:
        return found or known
    names = {module: plain_name(name) for name, module in calls.module.named_modules()}
    called = {each.module for each in calls.whole}

    def left(modules: Sequence[nn.Module]) -> list[nn.Module]:
        return [each for each in modules if not any(names.get(part) in called for part in each.modules())]

    return OtherTokens(whole=found.whole + left(known.whole), crossing=found.crossing + left(known.crossing))


def _by_module(
    whole: Sequence[AttentionCall], shorter: Sequence[AttentionCall]
) -> dict[str, list[tuple[AttentionCall, AttentionCall]]]:
    """Return each module's calls on both crops, pair by pair, where there are as many."""
    both: tuple[dict[str, list[AttentionCall]], ...] = (defaultdict(list), defaultdict(list))
    for calls, into in zip((whole, shorter), both, strict=True):
        for each in calls:
            into[each.module].append(each)
    return {
        name: list(zip(calls, both[1][name], strict=True))
        for name, calls in both[0].items()
        if len(calls) == len(both[1].get(name, []))
    }


def _follows(tokens: int, of_shorter: int, lengths: list[tuple[int, ...]]) -> bool:
    return any((tokens, of_shorter) == pair for pair in zip(*lengths, strict=True))


def _tower(name: str, own: set[str]) -> str:
    """Return the outermost module around one that holds no attention to the sequence."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        root = ".".join(parts[:end])
        if not any(each == root or each.startswith(f"{root}.") for each in own):
            return root
    return name
