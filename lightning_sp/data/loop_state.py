"""The cursor in the data, read from Lightning's loop counters, and the counters made to agree with it on resume.

The cursor is (epoch, optimizer steps done in it): what the weights were trained on. Lightning counts micro-batches. Its counters differ in five
cases:

- another accumulation
- a checkpoint within an accumulation
- a checkpoint after `max_steps` ended the loop within an epoch: the epoch then counts as done
- a checkpoint after a validation that the resuming run does not have
- the run after a resume from an epoch's last batch: the epoch never counts as begun

The loop would then skip or repeat samples, so the loaded counters are rewritten; otherwise they stay as they are. This works on the plain state
of the loops (Lightning 2.6).
"""

from __future__ import annotations

from typing import Any

from lightning_sp.data.samplers.training_sampler import GlobalBatchSampler

_COUNTERS = ("ready", "started", "processed", "completed")
# The length of a loader that has none: longer than any epoch.
ENDLESS = 2**62


def finished_epoch(*, batches_done: int, num_batches: float, is_last_batch: bool, epochs_done: int, epoch: int) -> bool:
    """Return whether nothing of `epoch` is left to train, for counters read at any moment.

    Args:
        batches_done: Micro-batches processed in the epoch.
        num_batches: Micro-batches that the trainer takes from an epoch.
        is_last_batch: Lightning's flag, which also says that a hook skipped the rest of the epoch.
        epochs_done: Epochs that Lightning has counted as processed.
        epoch: The epoch whose samples were fetched last.
    """
    return batches_done >= num_batches or (is_last_batch and epochs_done > epoch)


def sampler_cursor(sampler: GlobalBatchSampler, fit_loop: Any) -> dict[str, Any]:
    """Return the cursor of a training sampler at an optimizer-step boundary, from the counters of the loop that reads it."""
    epoch = sampler.started_epoch
    if epoch is None:
        steps = sampler.global_samples_skipped // sampler.split.global_batch_size
        return sampler.state_dict(steps * sampler.split.accumulation, sampler.epoch)
    progress = fit_loop.epoch_loop.batch_progress
    finished = finished_epoch(
        batches_done=progress.current.processed,
        num_batches=fit_loop.max_batches,
        is_last_batch=progress.is_last_batch,
        epochs_done=fit_loop.epoch_progress.current.processed,
        epoch=epoch,
    )
    return sampler.state_dict(0, epoch + 1) if finished else sampler.state_dict(progress.current.processed, epoch)


def align_loop_state(
    fit_loop: dict[str, Any], trainer: Any, *, epoch: int, steps: int, stored_accumulation: int, loader_length: int
) -> None:
    """Rewrite a stored fit loop, in place, where it disagrees with the cursor or with the resuming trainer.

    Args:
        fit_loop: ``checkpoint["loops"]["fit_loop"]``.
        trainer: The one that resumes.
        epoch: Of the cursor.
        steps: Optimizer steps done in that epoch; 0 when it has not begun.
        stored_accumulation: Micro-batches a step in the run that stored it.
        loader_length: Micro-batches of a whole epoch in this run, `ENDLESS` where it is not known.
    """
    limit = trainer.limit_train_batches
    num_batches = min(loader_length, limit) if isinstance(limit, int) else int(loader_length * limit)
    epochs, batches = fit_loop["epoch_progress"], fit_loop["epoch_loop.batch_progress"]
    accumulation = trainer.accumulate_grad_batches
    # A loader that one rank reads has as many micro-batches whatever the accumulation.
    same = stored_accumulation == accumulation or loader_length >= ENDLESS
    before = batches["total"]["ready"] - batches["current"]["ready"] if same else epoch * num_batches
    if steps:
        ends_before = epochs["current"]["processed"] > epoch
        at_the_step = batches["current"]["ready"] == batches["current"]["processed"] == steps * stored_accumulation
        _set(epochs, {"ready": epoch + 1, "started": epoch + 1, "processed": epoch, "completed": epoch})
        _move(batches, steps * accumulation, before)
        if ends_before or not at_the_step:
            _as_at_batch_end(batches)
            fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1  # Lightning counts this step again
            batches["is_last_batch"] = False
    elif epochs["current"]["processed"] < epoch:  # stored at the last batch of the epoch before: Lightning ends it
        _set(epochs, {"ready": epoch, "started": epoch})
        steps_begun = -(-batches["current"]["ready"] // stored_accumulation)
        ready = batches["current"]["ready"] if same else min(steps_begun * accumulation, num_batches)
        _move(batches, ready, before if same else before - num_batches)
    else:
        begun = batches["current"]["ready"] if epochs["current"]["started"] > epoch else 0
        before = batches["total"]["ready"] - begun if same else before
        _set(epochs, dict.fromkeys(_COUNTERS, epoch))
        batches.update(total=dict.fromkeys(_COUNTERS, before), current=dict.fromkeys(_COUNTERS, 0))
        batches["is_last_batch"] = False
        # With max_steps Lightning takes any start for one after a validation, and counts the step before it again.
        if trainer.max_steps != -1 and _validates_at(trainer, batches, epoch, num_batches):
            fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
        return
    stored_after_validation = len({batches["total"][name] for name in _COUNTERS}) == 1
    if stored_after_validation and not _validates_at(trainer, batches, epochs["current"]["completed"], num_batches):
        # Lightning resumes there only by skipping the same validation; without one it would train a batch too many.
        _as_at_batch_end(batches)


def _validates_at(trainer: Any, batches: dict[str, Any], epoch: int, num_batches: int) -> bool:
    """Return whether this trainer validates after the micro-batches counted."""
    interval, every_n_epochs = trainer.val_check_interval, trainer.check_val_every_n_epoch
    done = batches["current"]["ready"] if every_n_epochs is not None else batches["total"]["ready"]
    if not trainer.enable_validation or not isinstance(interval, int | float):
        return False
    if every_n_epochs is not None and (epoch + 1) % every_n_epochs:
        return False
    if isinstance(interval, float):
        interval = max(1, int(num_batches * interval))
    return bool(done % interval == 0)


def _as_at_batch_end(batches: dict[str, Any]) -> None:
    """Count as if stored in `on_train_batch_end`, with all but that hook done."""
    for tracker in batches["total"], batches["current"]:
        tracker.update(started=tracker["ready"], processed=tracker["ready"], completed=tracker["ready"] - 1)


def _set(progress: dict[str, Any], counters: dict[str, int]) -> None:
    """Set counters of this run, and those over all runs by as much."""
    for name, value in counters.items():
        progress["total"][name] += value - progress["current"][name]
        progress["current"][name] = value


def _move(batches: dict[str, Any], ready: int, before: int) -> None:
    """Set the micro-batches begun in this epoch and those before it, each counter keeping its distance."""
    current, total = batches["current"], batches["total"]
    distances = {name: (current[name] - current["ready"], total[name] - total["ready"]) for name in _COUNTERS}
    for name, (of_current, of_total) in distances.items():
        current[name] = ready + of_current
        total[name] = before + ready + of_total
