"""A step on a crop, and on larger ones where that shows nothing: it fails there whole, or no number of it could differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_sp.config import StrategyConfig
from lightning_sp.data.batch.shard_options import ShardOptions
from lightning_sp.preflight.crops.crop import Crop, whole_extent
from lightning_sp.preflight.crops.shared_crop import LONGER_TOKENS
from lightning_sp.preflight.explain.verdict import Agreement
from lightning_sp.preflight.run import TrialFailedError
from lightning_sp.step.runner import StepRunner

# Of a crop of all rows, up to which their tokens are whole.
MOST_TOKENS = 4 * LONGER_TOKENS


def compared_on_crops(
    compared: Callable[[Crop, Crop], Agreement | None],
    crops: tuple[Crop, Crop],
    larger: Sequence[Callable[[Crop], tuple[Crop, Crop] | None]],
    runner: StepRunner,
) -> tuple[Agreement | None, tuple[Crop, Crop]]:
    """Compare on a crop, and where the step fails on it whole, or says nothing there, on larger ones.

    Raises:
        TrialFailedError: it fails on all of them.
    """
    found: Agreement | None = None
    try:
        found = compared(*crops)
        failed = None
    except TrialFailedError as error:
        failed = error
    for make in larger:
        if failed is None and (found is None or found.says_something):
            break
        more = make(crops[0])
        if more is None:
            continue
        crops = more
        runner.start_run()
        try:
            found, failed = compared(*crops), None
        except TrialFailedError as error:
            failed = None if found is not None else error
    if failed is not None:
        raise failed
    return found, crops


def checkpoints(config: StrategyConfig) -> bool:
    """Return whether a step affords its tokens by checkpoints alone."""
    return config.checkpoint_policy not in ("auto", "none")


def of_all_rows(
    batch: Any, cut: Callable[..., tuple[Crop, Crop]], options: ShardOptions, config: StrategyConfig, crop: Crop
) -> tuple[Crop, Crop] | None:
    """Return crops of every row, for a step that tells rows by their number: a mean over none says nothing. None where they are no more."""
    rows, *lengths = whole_extent(batch, options)
    crops = cut(wanted=max(lengths) if rows * max(lengths) <= MOST_TOKENS else crop.tokens, all_rows=True)
    return crops if crops[0].rows > crop.rows and crops[0].num_targets != 0 else None


def of_whole_sequences(
    batch: Any, cut: Callable[..., tuple[Crop, Crop]], options: ShardOptions, config: StrategyConfig, crop: Crop
) -> tuple[Crop, Crop] | None:
    """Return crops of whole sequences, for a step that fails on shorter ones: it reads by places in them, or is made for one length.

    None where they are no longer than the crop on which it failed, or too long for a run on one device.
    """
    tokens = max(whole_extent(batch, options)[1:])
    longer = (
        cut(wanted=tokens)
        if tokens <= LONGER_TOKENS
        else cut(wanted=None, longer=True, checkpointed=checkpoints(config))
    )
    # Of any sequence: a transcript may be whole in the crop, and its sound is not.
    lengths = zip(whole_extent(longer[0].batch, options)[1:], whole_extent(crop.batch, options)[1:], strict=True)
    return longer if any(more > few for more, few in lengths) and longer[0].num_targets != 0 else None


# In the order in which they are tried.
LARGER = (of_whole_sequences, of_all_rows)
