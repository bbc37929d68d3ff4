"""What users and callbacks read of a run: its mesh, the layout of the batch in progress, and whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric

from lightning_sp import comm
from lightning_sp.comm import HostGroups
from lightning_sp.config import StrategyConfig, resolve_shard_size
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import SequenceLayout
from lightning_sp.mesh import SequenceMesh
from lightning_sp.step.fillers import forget_computed, metrics_put_back
from lightning_sp.step.results.batch_ends import holds_more_than_numbers, whole_batch
from lightning_sp.step.results.output_structure import with_tensors
from lightning_sp.step.results.predictions import KnownTokens, unsharded_output, whole_outputs
from lightning_sp.step.runner import StepRunner
from lightning_sp.trainer.hooks.batch_end_hooks import STEPS, BatchEnd
from lightning_sp.trainer.hooks.batch_hooks import of_user
from lightning_sp.trainer.log_once import LogOnce
from lightning_sp.trainer.logged_numbers.filler_logs import FillerLogs
from lightning_sp.trainer.logged_numbers.logged_sums import LoggedSums
from lightning_sp.trainer.logged_numbers.replaced_log import given_to_log, replaced_log
from lightning_sp.trainer.logged_numbers.watched_numbers import WatchedNumbers
from lightning_sp.trainer.loops import evaluated_step, monitored_names, sees_part, sums_of
from lightning_sp.trainer.optimizers.state_of_weights import states_by_weight
from lightning_sp.users_code.ownership import is_called_by_user
from lightning_sp.users_line import users_place

_NOT_GIVEN: Any = object()


class CurrentSequence:
    """The part of the strategy that is read from outside; the strategy sets what is read."""

    config: StrategyConfig
    _device_mesh: DeviceMesh | None
    _mesh: SequenceMesh | None = None
    _runner: StepRunner | None = None
    _batch: SequenceInfo | None = None
    _prepared: Any = None  # the module that is laid out
    _sums: LoggedSums
    _watched: WatchedNumbers
    _filler_logs: FillerLogs
    _log_once: LogOnce
    _module: Any
    _groups: HostGroups
    _views: Any  # `preflight.views.Views`: which kinds of steps see whole sequences
    optimizers: Any

    @property
    def zigzag_mesh(self) -> SequenceMesh:
        """Return the attention's mesh in the layout that a batch has where it gets none of its own; known once `setup` has seen the model."""
        if self._mesh is None:
            raise SequenceParallelError(
                "the attention's mesh is not known before the trainer has set up the model; ask for it in on_fit_start or later"
            )
        return self._mesh

    @property
    def sequence_mesh(self) -> SequenceMesh:
        """Return the attention's mesh, with the layout of the batch in progress; known once `setup` has seen the model."""
        mesh = self.zigzag_mesh
        return mesh if self._batch is None or self._batch.is_whole else replace(mesh, layout=self._batch.layout)

    @property
    def layout(self) -> SequenceLayout:
        """Return which tokens of the batch in progress each rank has: what `lightning_sp.shard` and `unshard` take. Zigzag before one."""
        return self.sequence_mesh.layout

    @property
    def sequence_parallel_size(self) -> int:
        """Return how many ranks share one sequence."""
        return 1 if self._device_mesh is None else int(self._device_mesh["sequence_parallel"].size())

    @property
    def sees_whole_sequences(self) -> bool:
        """Return whether steps are in the global view: by `global_view=True`, or since a step was refused without; known once set up."""
        return self._steps.context.global_view

    @property
    def _shard_size(self) -> int:
        return 1 if self._device_mesh is None else resolve_shard_size(self.config, self._device_mesh.size())

    @property
    def last_batch_shape(self) -> tuple[int, int, int] | None:
        """Return (rows, padded length, length) of the batch that was sharded last, in whole tokens; an encoder's and a decoder's together."""
        return None if self._batch is None else self._batch.shape

    def unshard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return whole sequences from every rank's part of the current batch, without padding, in global order.

        Shapes: (..., s, ...) -> (..., S, ...) along `dim`. Communicates: one all_gather over the sequence's ranks.
        """
        mesh = self.sequence_mesh
        return self._steps.unshard(tensor, self._batch, mesh, dim=dim)

    def _whole_output(self, output: Any, of: str, does: str = "", **options: Any) -> Any:
        """Return what a step returns or keeps with whole sequences. Every rank must call it.

        Args:
            output: tensors in any nest.
            of: what it is, in words: "predict_step returns".
            does: what the step does with it, in a message, if that is something else.
            options: of `unsharded_output`.
        """
        if self.sees_whole_sequences:
            return whole_outputs(output, self._groups, does or of)
        assert self._batch is not None
        known = KnownTokens(self._steps.context.token_outputs, of)
        return unsharded_output(output, self._batch, self.unshard, self._groups, does or of, known, **options)

    def _whole_batch_end(self, handed: BatchEnd, reads: tuple[bool, bool], hook: str) -> BatchEnd:
        """Return what a user's hook at a batch's end is handed with whole sequences. Every rank must call it."""
        info = self._batch
        if info is None or info.is_whole or self.sequence_parallel_size == 1:
            return handed
        outputs, batch = handed
        if reads[0] and hook != "on_predict_batch_end" and holds_more_than_numbers(outputs):
            detached = with_tensors(outputs, Tensor.detach)
            warn, step = partial(self._log_once.warn, topic=hook), STEPS[hook]
            outputs = self._whole_output(detached, f"{step} returns", f"{hook} is handed", left=warn)
        return BatchEnd(outputs, whole_batch(batch, info, self.unshard) if reads[1] else batch)

    def reduce(self, tensor: Any, group: Any | None = _NOT_GIVEN, reduce_op: Any = "mean") -> Any:
        """Reduce a number over the ranks, as Lightning does.

        A sum counts once where the ranks of a sequence have it together: `LoggedSums`, or where they have run the same rows. So it is where
        `self.log` asks, which says that it names no group, and where a user's own line does. A library that says nothing counts ranks.
        """
        by_hand = group is _NOT_GIVEN and isinstance(tensor, Tensor) and is_called_by_user()
        if by_hand and self._runner is not None and self._steps.context.reference is not None:
            return tensor  # a trial of one device's step
        total = partial(super().reduce, group=None if group is _NOT_GIVEN else group, reduce_op="sum")  # type: ignore[misc]
        if by_hand and reduce_op in ("sum", dist.ReduceOp.SUM):
            return self._filler_logs.reduced(tensor, "sum", partial(self._reduced, None, place=users_place()), total)
        return self._filler_logs.reduced(tensor, reduce_op, partial(self._reduced, group), total)

    def _reduced(self, group: Any | None, tensor: Any, reduce_op: Any, *, place: str = "") -> Any:
        logged, group = group is None, None if group is _NOT_GIVEN else group
        if group is None and reduce_op == "sum" and self._mesh is not None:
            if self._batch is not None and self._batch.is_whole:
                group = self._mesh.data_group
            elif logged and self._mesh.layout.size > 1 and (place or _is_number(tensor)):
                return self._add_up(tensor, place)
            else:
                group = self._mesh.token_group
        return super().reduce(tensor, group, reduce_op)  # type: ignore[misc]

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor as Lightning does: where the ranks of a sequence have the same rows, from one rank of each data-parallel group.

        In a step beside fillers, from the ranks whose rows count.

        Raises:
            SequenceParallelError: ranks have tensors of other shapes or dtypes; on all of them.
        """
        of_world = group is None or group is dist.group.WORLD  # Lightning's own word for none
        mesh, batch = self._mesh, self._batch
        if not of_world or mesh is None:
            return super().all_gather(tensor, group, sync_grads)  # type: ignore[misc,no-any-return]
        _check_shapes(comm.gather_objects((tuple(tensor.shape), tensor.dtype), self._groups.world))
        counted = self._filler_logs.counted(self._groups.world)
        if batch and (batch.is_whole or (self.sees_whole_sequences and mesh.layout.size > 1)):
            with nullcontext() if sync_grads else torch.no_grad():
                found = torch.stack(comm.gather_over_ranks(tensor.contiguous(), mesh.data_group))
            counted = counted and counted[:: len(counted) // len(found)]
        else:
            found = super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]
        return found if counted is None else found[torch.tensor(counted, device=found.device)]

    def _add_up(self, number: Tensor, place: str) -> Tensor:
        """Return the sum of a number, of which its values tell how it adds up, and its name; by hand at a place it has none."""
        trainer = self._module.trainer
        logged = {} if place else sums_of(trainer, number)
        # Of what a step leaves to hooks the preflight has told that it is one device's.
        of_hooks = self.config.preflight and not any(map(sees_part, logged.values() or [self._module._current_fx_name]))
        whole = of_hooks or self._views.sees_whole(evaluated_step(trainer))
        return self._sums.add_up(number, self.sequence_mesh, self._groups.world, [*logged], is_whole=whole, place=place)

    def _counted_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step of Lightning's strategy; what it logs is known where it is added up."""
        logged_once = self._steps.context.logged_once.get(step.__name__, {})
        context, mesh = self._steps.context, self.sequence_mesh
        trains = step.__name__ == "training_step" and not context.global_view
        watched = context.watched_numbers if trains else ()
        reads_states = step.__name__ == "training_step" and self._module.automatic_optimization
        with (
            self._sums.of_step(self._module, logged_once, mesh),
            self._watched.of_step(self._module, watched, mesh, self._steps.device),
            self._follow_names() if trains and context.trial_seed is None else nullcontext(),
            states_by_weight(self.optimizers if reads_states else (), self._module),
            self._beside_fillers(step.__name__),
            self._sync_monitored(step.__name__),
        ):
            return step(self, *args, **kwargs)

    @contextmanager
    def _sync_monitored(self, step: str) -> Iterator[None]:
        """Let a number by which callbacks decide be that of all groups' samples, as on one device, though it is logged without sync_dist."""
        trainer, log = self._module.trainer, self._module.log
        several = step == "validation_step" and self.zigzag_mesh.data_parallel_size > 1
        monitored = monitored_names(trainer) if several and not self._steps.context.is_tried else []
        # Under several loaders, and of a step and an epoch, a number has longer names than in `self.log`.
        names = {name.partition("/dataloader_idx_")[0].removesuffix("_epoch") for name in monitored} | {*monitored}
        if not names:
            yield
            return

        def synced(*args: Any, **kwargs: Any) -> None:
            given = given_to_log(args, kwargs)
            name, own = str(given.get("name")), not (given.get("sync_dist") or given.get("rank_zero_only"))
            if own and len(args) <= 2 and name in names and not isinstance(given.get("value"), Metric):
                kwargs["sync_dist"] = True
                self._log_once(
                    f"{name} is monitored, and each data-parallel group has samples of its own: it is logged as with sync_dist=True",
                    topic=f"monitored {name}",
                )
            log(*args, **kwargs)

        with replaced_log(self._module, synced):
            yield

    @contextmanager
    def _beside_fillers(self, step: str) -> Iterator[None]:
        """Run a step whose batch holds fillers on some rank, so that these count nowhere, or unequally many rows; any other as it is."""
        batch, trains = self._batch, step == "training_step"
        if batch is None or not batch.counts_apart(trains=trains) or self._steps.context.is_tried:
            yield
            return
        holders = [self._module, *of_user(self._module.trainer)]
        puts_back = metrics_put_back(holders, trains=trains) if batch.is_filler else nullcontext()
        with self._filler_logs.beside(batch, batch.rows if trains else 1), puts_back:
            yield
        forget_computed(holders)

    @contextmanager
    def _follow_names(self) -> Iterator[None]:
        """Note whether a training step logs under a name that no trial has compared: each name once."""
        context, log = self._steps.context, self._module.log
        known, step = context.logged_names, context.step
        if known is None or step is None or step.batch.layout.size == 1:
            yield
            return

        def note(*args: Any, **kwargs: Any) -> None:
            name = given_to_log(args, kwargs).get("name")
            step.logs_new |= name not in (context.logged_names or ())
            context.logged_names = frozenset({*(context.logged_names or ()), str(name)})
            log(*args, **kwargs)

        with replaced_log(self._module, note):
            yield

    @property
    def _steps(self) -> StepRunner:
        assert self._runner is not None
        return self._runner


def _check_shapes(of_ranks: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Refuse to gather tensors of other shapes or dtypes: the backend would read beyond some, or end the process."""
    if len(set(of_ranks)) > 1:
        listed = "; ".join(f"rank {rank}: {shape}, {dtype}" for rank, (shape, dtype) in enumerate(of_ranks))
        raise SequenceParallelError(
            f"all_gather of tensors that differ between ranks ({listed}): must have one shape and dtype on all, and data-parallel groups may "
            "have unequally many samples; pad them, use a torchmetrics metric (CatMetric), or lightning_sp.reductions.gather_rows in the step"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1
