"""What a checkpoint stores of a run beside weights and optimizers: its data cursor, its random streams, and whether replicas agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lightning_sp.comm import Written
from lightning_sp.context.dropout import DropoutSource
from lightning_sp.mesh import SequenceMesh
from lightning_sp.step.agreement.agreed_update import AgreedUpdate
from lightning_sp.step.agreement.agreed_writes import AgreedWrites
from lightning_sp.step.agreement.rank_alone import RankAloneWatch
from lightning_sp.step.agreement.rank_buffers import RankBuffers
from lightning_sp.step.agreement.replicas import ReplicaWatch
from lightning_sp.step.resume.data_cursor import DataCursor
from lightning_sp.step.resume.random_streams import RandomStreams
from lightning_sp.step.users_numbers.schedules import Schedules
from lightning_sp.trainer.hooks.batch_hooks import acts_before_updates

# Of what the strategy adds to Lightning's checkpoint.
KEY = "lightning_sp"


class RunState:
    """One run's state; a class because its steps move it on, a checkpoint stores it and a resume sets it.

    Attributes:
        cursor: how far the training loader has come.
        streams: the random numbers of each rank.
        replicas: whether ranks that hold the same shard hold the same numbers.
        alone: what one rank alone has of the model.
        update: whether ranks are about to step by the same learning rates.
        writes: whether ranks have written to their shards alike.
        buffers: of data-parallel ranks that have whole sequences, each of which writes its own.
        schedules: numbers of the user's that change by which a step may do other things.
    """

    def __init__(self) -> None:
        self.cursor = DataCursor()
        self.streams = RandomStreams()
        self.replicas = ReplicaWatch()
        self.alone = RankAloneWatch()
        self.update = AgreedUpdate()
        self.writes = AgreedWrites()
        self.buffers = RankBuffers()
        self.schedules = Schedules()

    def start(self, trainer: Any, mesh: SequenceMesh, group: ProcessGroup | None, *, fitting: bool) -> None:
        """Begin a run with rank 0's seed. Communicates: one broadcast of it; as `AgreedWrites.compare` and `start`, `AgreedUpdate.start`."""
        module = trainer.lightning_module
        self.buffers.follow(module, mesh)
        self.writes.compare(group)
        if fitting:
            between = acts_before_updates(trainer)
            strategy = trainer.strategy
            self.writes.start(
                module,
                mesh,
                group,
                plugin=strategy.precision_plugin,
                # In the backward each block's part is stepped by itself, at another time on each rank.
                optimizers=() if strategy.config.optimizer_in_backward else strategy.optimizers,
                acts_between=between,
            )
        if fitting:
            self.update.start(trainer.strategy.optimizers, module, group)
            self.streams.start_run(trainer.global_step, mesh)
            self.replicas.start_run(trainer.global_step)
            self.alone.start_run(trainer.global_step)
            self.schedules.start(trainer)
        else:
            self.streams.share_seed()

    @property
    def written(self) -> Written:
        """What this rank has written to outside of its steps."""
        return Written(self.buffers.digest, self.writes.digest, self.writes.described)

    def have_changed(self, trainer: Any, batch: Any) -> bool:
        """Return whether numbers of the user's have, by which the step may do other things, before a training batch."""
        return self.schedules.have_changed(trainer, batch)

    def compare_ranks(self, module: Any, mesh: SequenceMesh, shard_size: int, group: ProcessGroup | None) -> None:
        """Before a batch warn of what ranks no longer have alike, where it is time to look. Every rank must call it.

        Communicates: now and then, as `ReplicaWatch.compare` and `RankAloneWatch.compare`.
        """
        step = module.trainer.global_step
        self.replicas.watch(module, step, shard_size, group)
        self.alone.watch(module, step, mesh, group)

    def end_fit(self, module: Any, mesh: SequenceMesh, group: ProcessGroup | None) -> None:
        """Give all ranks the buffers that a checkpoint has, and warn of what they do not have alike. Every rank must call it.

        Raises:
            SequenceParallelError: they have written to their parts of the model differently since the last batch.
        """
        self.writes.compare(group)
        self.buffers.share_all()
        self.alone.compare(module, module.trainer.global_step, mesh, group)

    def begin_micro_batch(self, rows: int, trainer: Any, mesh: SequenceMesh, device: torch.device) -> DropoutSource:
        """Move on by a micro-batch of training; return what its attention dropout is drawn by."""
        self.cursor.note_micro_batch(rows, trainer, mesh)
        self.streams.begin_micro_batch()
        return self.streams.dropout_source(rows, trainer.global_step, mesh, device)

    def end_backward(self, group: ProcessGroup | None) -> None:
        """Read whether ranks are about to step alike. As `AgreedUpdate.check`."""
        self.update.check(group)

    def store(
        self,
        checkpoint: dict[str, Any],
        module: nn.Module,
        trainer: Any,
        mesh: SequenceMesh,
        *,
        shard_size: int,
        group: ProcessGroup | None,
    ) -> None:
        """Write the state into a checkpoint, in plain values; warn of replicas that have come apart. Every rank must call it.

        Args:
            checkpoint: Lightning's.
            module: the sharded module.
            trainer: of the run.
            mesh: the attention's.
            shard_size: ranks over which parameters are split.
            group: the world, on a backend for host tensors.

        Communicates: every rank's random states; what `AgreedWrites.compare`, `ReplicaWatch.compare`, `RankAloneWatch.compare` and
            `RankBuffers.share_all` do.

        Raises:
            SequenceParallelError: ranks have written to their parts of the model differently, and the checkpoint would be of both.
        """
        self.writes.compare(group)
        self.buffers.share_all()
        self.replicas.compare(module, trainer.global_step, shard_size, group)
        self.alone.compare(module, trainer.global_step, mesh, group)
        self.cursor.drop_marks(checkpoint)
        checkpoint[KEY] = {
            "format": 1,
            "shard_size": shard_size,
            **self.streams.stored(trainer.global_step, mesh, group),
            **self.cursor.stored(trainer, mesh),
        }

    def resume_data(self, checkpoint: Mapping[str, Any], trainer: Any, *, dp_size: int) -> None:
        """Continue at a checkpoint's cursor; as `DataCursor.resume`."""
        stored, loop_state = checkpoint.get(KEY) or {}, checkpoint["loops"]["fit_loop"]
        self.cursor.resume(stored.get("position"), loop_state, trainer, dp_size=dp_size)

    def resume_streams(self, checkpoint: Mapping[str, Any], trainer: Any, mesh: SequenceMesh) -> None:
        """Go on with a checkpoint's random streams; as `RandomStreams.restore`."""
        self.streams.restore(checkpoint.get(KEY), trainer, mesh)

    def end(self) -> None:
        """Forget what the run was resumed at."""
        self.writes.end()
        self.cursor.end_of_run()
        self.streams.end_of_run()
