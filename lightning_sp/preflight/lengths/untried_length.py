"""Steps that branch on a length which no trial has reached: a rank's part is shorter than the whole, and would take another branch.

if x.shape[1] > 6_000: ...          S = 8,192 on 2 ranks: a rank has 4,096, and a trial on one device no more than a rank affords
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_sp.data.batch.contents.entries import plain_entries
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize import without_checkpoints, without_tiles
from lightning_sp.preflight.crops.both_runs import untouched_run
from lightning_sp.preflight.crops.crop import Crop, crop_batch, whole_extent
from lightning_sp.preflight.crops.media import placeholders
from lightning_sp.preflight.crops.shorter import RunStep
from lightning_sp.preflight.lengths.by_shapes import Called, by_shape, calls_by_shapes
from lightning_sp.preflight.trial import together
from lightning_sp.step.runner import StepRunner

# Lengths that these divide are looked at beside those that were tried: what pads to a multiple does nothing there.
_MULTIPLES = (1024, 256)
_INSTALLED = ("site-packages", "dist-packages")
# What Hugging Face's interface does by the length is done by the whole length here (`rewrite/hugging_face/`): masks, their use, RoPE.
_CARRIED = ("transformers/modeling_rope_utils.py", "transformers/masking_utils.py", "transformers/integrations/")
_MOST_SHOWN = 3


def check_untried_length(
    batch: Any, own: Crop, runner: StepRunner, run: RunStep, options: ShardOptions, tried: Collection[int]
) -> None:
    """Refuse a step that calls other functions at the batch's length than at those that were tried. Every rank must call it.

    It is seen by shapes alone. Lines of the user are refused, those of installed libraries named in a warning.

    Args:
        batch: as the loader gave it, whole.
        own: its crop that was tried: as many rows are taken here.
        runner: of the model's steps.
        run: the user's training_step on a batch.
        options: which tensors carry the sequence.
        tried: the tokens of the crops that were compared.

    Raises:
        SequenceParallelError: a line of the user's is called at one of the lengths alone; on all ranks together.
    """
    _, *lengths = whole_extent(batch, options)
    longest, most = max(lengths), max(tried)
    with together():  # other data-parallel groups may have batches of another length, or images
        if longest > most and placeholders(plain_entries(batch), options) is None:
            multiples = (most - most % each for each in _MULTIPLES if most >= each)
            references = sorted({*tried, *multiples, max(1, most // runner.context.mesh.layout.size)} - {0})
            extents = [(own.rows, *(min(each, tokens) for each in lengths)) for tokens in (*references, longest)]
            _look(runner, [_by_shape(batch, each, runner, run, options) for each in extents], most, longest)


def _look(runner: StepRunner, runs: Sequence[Callable[[], Any]], most: int, longest: int) -> None:
    """Judge what the last run calls beside the others, which are of at most `most` tokens."""
    with without_checkpoints(runner.module), without_tiles(runner.module):
        found = calls_by_shapes(runner.module, runs)
    if found.failure is not None:
        rank_zero_info(
            f"preflight: whether training_step branches on a length between {most:,} and {longest:,} tokens is not known, for it does not "
            f"run by shapes alone: {found.failure}"
        )
        return
    *shorter, whole = found.runs
    everywhere = set.intersection(*map(set, shorter))
    anywhere: set[Called] = set().union(*shorter)
    # A number that goes with the length is another at each; one that has stayed and then changes was chosen by the length.
    chosen = [
        each
        for each in everywhere & whole.keys()
        if len({run[each] for run in shorter}) == 1 and whole[each] != shorter[0][each]
    ]
    size = runner.context.mesh.layout.size
    _judge([*(whole.keys() - anywhere), *(everywhere - whole.keys()), *chosen], most, longest, size)


def _by_shape(
    batch: Any, extent: tuple[int, ...], runner: StepRunner, run: RunStep, options: ShardOptions
) -> Callable[[], Any]:
    """Return what runs the step, as one device does, on so many rows and tokens without numbers; in a process that ends with it."""
    part = untouched_run(crop_batch(batch, options, extent).batch, options, runner.device)
    module: Any = runner.module

    def step() -> Any:
        for name in ("log", "log_dict"):
            setattr(module, name, lambda *_, **__: None)
        with runner.context.inactive(part.info):
            return run(by_shape(part.batch), part.info)

    return step


def _judge(calls: Iterable[Called], most: int, longest: int, size: int) -> None:
    others = [each for each in calls if not any(path in Path(each.file).as_posix() for path in _CARRIED)]
    users = [each for each in others if not any(folder in each.file for folder in _INSTALLED)]
    if users:
        raise SequenceParallelError(_message(users, most, longest, size))
    if others:
        rank_zero_warn(_message(others, most, longest, size))


def _message(calls: Sequence[Called], most: int, longest: int, size: int) -> str:
    return (
        f"preflight: at {longest:,} tokens training_step calls other functions of torch than at {most:,}, or with other numbers "
        f"({_shown(calls)}): it branches on the "
        f"length, of which a rank sees {longest // size:,} tokens, and a trial on one device no more than {most:,}; use global_view=True, in "
        f"which the step sees the whole length, or a first batch of at least {size} rows, one of which is tried whole"
    )


def _shown(calls: Iterable[Called]) -> str:
    """Return the first lines, with what they call."""
    lines: dict[tuple[str, int], list[str]] = {}
    for each in sorted(calls):
        lines.setdefault((each.file, each.line), []).append(each.name)
    shown = [
        f"{Path(file).name}:{line}: {linecache.getline(file, line).strip()}" for file, line in list(lines)[:_MOST_SHOWN]
    ]
    more = len(lines) - len(shown)
    return "; ".join(shown) + (f"; and {more} more lines" if more else "")
