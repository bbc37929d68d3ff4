"""The cursor of users' own training loaders: what a checkpoint stores of it, and a resume. `SequenceShardingDataModule` stores its own.

Where the loader follows one of our samplers the cursor is the global samples consumed, and holds for any degrees of the same global batch. The
batches of a loader that one rank reads have no index: a loader that keeps its own state goes on from that, on as many data-parallel groups. Any
other is read again from the epoch's start, and what was consumed is discarded.
"""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_sp.data.datamodule import SequenceShardingDataModule
from lightning_sp.data.loaders.broadcast_loader import BroadcastLoader
from lightning_sp.data.loaders.replace_sampler import training_sampler
from lightning_sp.data.loop_state import ENDLESS, align_loop_state, finished_epoch, sampler_cursor
from lightning_sp.data.samplers.batch_split import num_trained
from lightning_sp.data.samplers.training_sampler import GlobalBatchSampler
from lightning_sp.errors import SequenceParallelError


def loader_cursor(trainer: Any, *, epoch: int, rows: int, dp_size: int) -> dict[str, Any] | None:
    """Return the training loader's cursor in plain values, None where a DataModule stores it or nothing was read.

    Args:
        trainer: the one that saves.
        epoch: of the last micro-batch.
        rows: samples in a micro-batch.
        dp_size: data-parallel ranks.
    """
    combined = trainer.fit_loop._combined_loader
    if combined is None or isinstance(trainer.datamodule, SequenceShardingDataModule):
        return None
    loaders, accumulation = combined.flattened, trainer.accumulate_grad_batches
    sampler = training_sampler(loaders[0]) if len(loaders) == 1 else None
    if sampler is not None:
        return {"kind": "order", **sampler_cursor(sampler, trainer.fit_loop), "accumulation": accumulation}
    progress = trainer.fit_loop.epoch_loop.batch_progress
    finished = finished_epoch(
        batches_done=progress.current.processed,
        num_batches=trainer.fit_loop.max_batches,
        is_last_batch=progress.is_last_batch,
        epochs_done=trainer.fit_loop.epoch_progress.current.processed,
        epoch=epoch,
    )
    steps = 0 if finished else progress.current.processed // accumulation
    only = loaders[0] if len(loaders) == 1 and isinstance(loaders[0], BroadcastLoader) else None
    own = None if only is None else only.own_states(steps * accumulation, finished=finished)
    return {
        "own_states": own,
        "kind": "read",
        "loaders": len(loaders),
        "epoch": epoch + 1 if finished else epoch,
        "steps": steps,
        "rows": rows,
        "dp_size": dp_size,
        "accumulation": accumulation,
        "global_batch_size": rows * dp_size * accumulation,
    }


def align_loops(cursor: dict[str, Any], fit_loop: dict[str, Any], trainer: Any, *, dp_size: int) -> None:
    """Make the stored loop counters agree with the cursor, in place, before Lightning loads them; note in the cursor whether it begins an epoch.

    Raises:
        SequenceParallelError: a run at these degrees cannot continue there.
    """
    steps, length = cursor.get("steps", 0), ENDLESS
    if cursor["kind"] == "order":
        steps = cursor["global_samples_consumed"] // cursor["global_batch_size"]
    # Stored behind an epoch: nothing of an order is left, and the next one is this run's own, as Lightning has it.
    cursor["begins_epoch"] = not steps and fit_loop["epoch_progress"]["current"]["processed"] >= cursor["epoch"] > 0
    if cursor["kind"] == "order":
        size, accumulation = cursor["global_batch_size"], trainer.accumulate_grad_batches
        if size % accumulation == 0:  # otherwise `resume_loader` refuses
            trained = num_trained(cursor["num_samples"], size, accumulation, cursor["last"])
            length = -(-trained // (size // accumulation))
    elif steps:
        if cursor["loaders"] > 1:
            raise SequenceParallelError(
                f"the checkpoint was stored within an epoch ({steps} steps) over {cursor['loaders']} training loaders, of which only the "
                "common count is known: resume from a checkpoint of an epoch's end, or train from one loader"
            )
        if (dp_size, trainer.accumulate_grad_batches) != (cursor["dp_size"], cursor["accumulation"]):
            raise SequenceParallelError(
                f"the checkpoint was stored within an epoch ({steps} steps) of a loader whose order cannot be replaced, with data_parallel_size="
                f"{cursor['dp_size']} and accumulate_grad_batches={cursor['accumulation']}; this run has {dp_size} and "
                f"{trainer.accumulate_grad_batches}, which read it otherwise: use the same, or resume from a checkpoint of an epoch's end"
            )
    align_loop_state(
        fit_loop,
        trainer,
        epoch=cursor["epoch"],
        steps=steps,
        stored_accumulation=cursor["accumulation"],
        loader_length=length,
    )


def check_epoch_end(fit_loop: dict[str, Any], trainer: Any) -> None:
    """Refuse a checkpoint without a cursor (of another strategy) that was stored within an epoch.

    Raises:
        SequenceParallelError: with the micro-batches done.
    """
    epochs, batches = fit_loop["epoch_progress"]["current"], fit_loop["epoch_loop.batch_progress"]
    done = batches["current"]["ready"]
    if isinstance(trainer.datamodule, SequenceShardingDataModule) or not done or batches["is_last_batch"]:
        return
    raise SequenceParallelError(
        f"the checkpoint was stored within epoch {epochs['processed']}, after {done} micro-batches, and holds no data cursor of lightning_sp: "
        "which samples they were is not known; resume from a checkpoint of an epoch's end"
    )


def resume_loader(loader: Any, cursor: dict[str, Any]) -> None:
    """Set a processed training loader to a stored cursor.

    Raises:
        SequenceParallelError: the loader, its order or the global batch differ from the stored ones.
    """
    sampler = training_sampler(loader)
    if cursor.get("begins_epoch") and cursor["kind"] == "order":
        _begin_epoch(sampler, cursor)
        return
    if cursor["kind"] == "order":
        if sampler is None:
            raise SequenceParallelError(
                f"the checkpoint's data cursor is of a loader whose samples lightning_sp orders ({cursor['num_samples']} samples), but "
                f"this run's training loader, a {type(loader).__name__}, orders its samples itself: give a loader like that of the stored run, "
                "or resume from a checkpoint that was stored at the end of an epoch"
            )
        sampler.load_state_dict(cursor)
        return
    count = cursor["steps"] * cursor["accumulation"]
    if isinstance(loader, BroadcastLoader) and loader.resume(cursor.get("own_states"), count):
        return
    if cursor["steps"]:
        if not isinstance(loader, BroadcastLoader):
            raise SequenceParallelError(
                "the checkpoint's data cursor is of a loader that one rank reads, this run's training loader follows lightning_sp's order: "
                "give the same loader, or resume from a checkpoint of an epoch's end"
            )
        loader.skip = count
        rank_zero_warn(
            f"sequence_parallel: {loader.skip} micro-batches of {type(loader.loader).__name__} are read again and discarded, to continue "
            f"within epoch {cursor['epoch']}: {_sameness(loader, cursor['epoch'])}"
        )


def _begin_epoch(sampler: GlobalBatchSampler | None, cursor: dict[str, Any]) -> None:
    """Begin a stored epoch by this run's own data, and say what is other than in the run before."""
    if sampler is None:
        return
    stored = {name: cursor[name] for name in ("seed", "shuffle", "num_samples", "global_batch_size")}
    own = {
        **{name: getattr(sampler, name, None) for name in stored},
        "global_batch_size": sampler.split.global_batch_size,
    }
    if other := [f"{name} is {own[name]}, and was {stored[name]}" for name in stored if own[name] != stored[name]]:
        rank_zero_warn(
            f"sequence_parallel: epoch {cursor['epoch']} begins in an order of its own: {'; '.join(other)} in the run that stored the checkpoint"
        )
    sampler.resume(0, cursor["epoch"])


def _sameness(loader: BroadcastLoader, epoch: int) -> str:
    """Return in words whether a loader gives an epoch's batches in the order of the run before."""
    batches = getattr(loader.loader, "batch_sampler", None)
    samplers = (getattr(loader.loader, "sampler", None), getattr(batches, "sampler", None))
    drawing = [
        each for each in samplers if isinstance(each, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))
    ]
    if drawing:
        has_generator = drawing[0].generator is not None
        # Dealt over groups, what is drawn without a generator is a function of the epoch; a generator begins as it did in the first epoch.
        if not (epoch == 0 if has_generator else loader.dealt is not None):
            how = "its generator, which has begun anew" if has_generator else "the process' random numbers"
            return (
                f"its {type(drawing[0]).__name__} draws another order than the run before, from {how}, so that of this epoch some samples come "
                "twice and others not at all; exact are a checkpoint of an epoch's end, and a sampler whose set_epoch makes its order"
            )
    return "exact if the loader gives them in the same order as before"


def check_global_batch(cursor: dict[str, Any], *, rows: int, dp_size: int, accumulation: int) -> None:
    """Refuse a first micro-batch that does not make the stored global batch.

    Raises:
        SequenceParallelError: with the numbers, and the micro-batches that do.
    """
    size, stored = rows * dp_size * accumulation, cursor["global_batch_size"]
    if size == stored or (
        rows < cursor["rows"] and dp_size * accumulation == cursor["dp_size"] * cursor["accumulation"]
    ):
        return
    per_rank, rest = divmod(stored, dp_size)
    pairs = [(m, per_rank // m) for m in range(1, per_rank + 1) if per_rank % m == 0] if not rest else []
    fix = (
        f"at dp {dp_size} these (micro-batch, accumulate_grad_batches) do: {pairs}"
        if pairs
        else f"{stored} is not a multiple of dp {dp_size}"
    )
    raise SequenceParallelError(
        f"micro-batch {rows} x accumulate_grad_batches {accumulation} x dp {dp_size} = {size} samples a step, but the checkpoint's global batch "
        f"is {stored}: {fix}"
    )
