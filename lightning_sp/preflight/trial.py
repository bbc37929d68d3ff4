"""One training_step, tried without a trace: whole, as one device runs it, and sharded, as a step of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.context.streams import streams_from
from lightning_sp.errors import SequenceParallelError, text_of, told_error
from lightning_sp.layout import positions
from lightning_sp.loss.counted_terms import counted_terms, describe_terms
from lightning_sp.parallelize import (
    failing_together,
    gathered,
    reduce_dtypes,
    with_whole_weights,
    without_checkpoints,
    without_tiles,
)
from lightning_sp.preflight.backward import gradients_of
from lightning_sp.preflight.comparison import buffers_of
from lightning_sp.preflight.failing_steps import what_to_look_at
from lightning_sp.preflight.outcome import Outcome
from lightning_sp.preflight.recording.attributes import numbers_left
from lightning_sp.preflight.recording.hidden_terms import Call, HiddenTerms, Weights
from lightning_sp.preflight.recording.logged import Number, metrics_begin_anew, recorded_numbers
from lightning_sp.preflight.recording.numbers_read.forced_numbers import Forced, forcing
from lightning_sp.preflight.recording.numbers_read.read_numbers import numbers_read
from lightning_sp.preflight.recording.token_outcomes import Other, TokenOutcomes, Tokens
from lightning_sp.preflight.recording.trace import Trace, traced
from lightning_sp.preflight.recording.watch import AttentionCall, Watch, module_stack
from lightning_sp.step.isolation.snapshot import isolated
from lightning_sp.step.results.kept_values import KeptValues
from lightning_sp.step.results.output_structure import leaves_of, shapes_of

SEED = 1234


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A step to be tried, whole and sharded.

    Args:
        module: the sharded module.
        context: its step in progress; switched off for whole runs.
        run_whole: runs training_step on a whole crop and returns what it returned.
        run_sharded: begins a step as in training, runs training_step on this rank's part and returns what it returned, with the loss as a mean.
        batch: what the whole crop holds.
        of_group: runs training_step on the whole crop of this rank's data-parallel group, and what that holds.
        shorter: a shorter crop's runner and what it holds; None where none can be shorter.
        shorter_text: likewise, without images, videos and sounds; None where the batch has none.
        own: what this rank's group's crop holds.
        first_row: of it, in the whole crop.
        sequence_rank: of this rank.
        crop: what is compared, in words.
        device: where the module is.
        control_group: the world, on a backend for host objects.
        in_float32: switches autocast off for the runs within; None where there is none.
        may_retry: a refusal is not the last word: no causes are looked for, and numbers that are not one device's are refused.
        shown: calls that hide terms of the loss, and are to show them.
        turned: calls that give one outcome for all tokens, and are to give others for some.
        turned_once: for one token of each row alone.
        forced: comparisons of numbers of the batch that are to come out otherwise, of whole runs; None for none.
    """

    module: nn.Module
    context: SequenceContext
    run_whole: Callable[[], Any]
    run_sharded: Callable[[], Any]
    batch: SequenceInfo
    of_group: tuple[Callable[[], Any], SequenceInfo]
    shorter: tuple[Callable[[], Any], SequenceInfo] | None
    shorter_text: tuple[Callable[[], Any], SequenceInfo] | None
    own: SequenceInfo
    first_row: int
    sequence_rank: int
    crop: str
    device: torch.device
    control_group: ProcessGroup | None
    in_float32: Callable[[], AbstractContextManager[None]] | None = None
    may_retry: bool = False
    shown: Mapping[Call, Weights] = field(default_factory=dict)
    turned: Mapping[Call, Other] = field(default_factory=dict)
    turned_once: bool = False
    forced: Forced | None = None

    def learn_outputs(self, whole: Outcome, sharded: Outcome) -> None:
        """Note whether the step keeps tensors, and which of those, and of what it returns, have tokens. Every rank must call it."""
        self.context.keeps_in_training |= any(comm.gather_objects(sharded.keeps, self.control_group))
        if not self.context.global_view:
            lengths = [each.part_and_whole for each in self.own.all_sequences]
            for of, *both in zip(("returns", "keeps"), whole.shapes, sharded.shapes, strict=True):
                self.context.token_outputs.compare(f"training_step {of}", both[0], both[1], lengths)

    @property
    def positions(self) -> Tensor:
        """The global positions of this rank's tokens, on the CPU."""
        return positions(self.own.layout, self.own.padded_length, self.sequence_rank)

    def whole(self, seed: int = SEED) -> Outcome:
        """Run the whole crop, forward and backward, with every random stream from one seed, alike on all ranks.

        Raises:
            SequenceParallelError: it fails; on all ranks together.
        """
        with together(), self._alone(self.batch, seed), module_stack(self.module) as stack:
            calls: list[AttentionCall] = []
            before = KeptValues(self.module, trains=True)
            self.context.noted_terms.clear()
            with self.context.recorded(lambda q, k: calls.append(AttentionCall(stack.innermost, q, k))):
                try:
                    with (
                        HiddenTerms(self.shown) as terms,
                        TokenOutcomes(self._tokens(self.batch, 0), self.turned) as outcomes,
                        Watch(self.module, stack) as watch,  # within: what those draw is no draw of the step's
                        numbers_read(self.module, self.context) as read,
                        forcing(self.forced, self.module),
                    ):
                        output = self.run_whole()
                        loss = _loss_of_whole(output)
                except (SequenceParallelError, comm.PeerError):
                    raise
                except (Exception, SystemExit) as error:
                    if comm.is_of_communication(error):
                        raise  # another rank is late or has ended: nothing is known of the model
                    raise SequenceParallelError(
                        f"preflight: training_step fails on {self.crop}: {told_error(error)}; {what_to_look_at(error)}"
                    ) from error
            return Outcome(
                loss=loss,
                terms=describe_terms(loss, self.context),
                gradients=gradients_of(self.module, loss),
                buffers=buffers_of(self.module),
                dtypes=frozenset(watch.dtypes | reduce_dtypes(self.module)),
                draws=tuple(watch.all_draws()),
                attention=tuple(calls),
                shapes=(shapes_of(leaves_of(output)), shapes_of(leaves_of(before.new()))),
                hidden=terms.found,
                read=read,
                left=numbers_left(self.module),
                token_outcomes=outcomes.found,
            )

    def attention_of_shorter(self, *, text_alone: bool = False) -> tuple[AttentionCall, ...] | None:
        """Return the attention calls of a shorter whole crop; None where there is none, or the step fails on it.

        Args:
            text_alone: of the one without images, videos and sounds.
        """
        shorter = self.shorter_text if text_alone else self.shorter
        if shorter is None:
            return None
        run, batch = shorter
        return attention_calls(
            self.module, self.context, run, batch, device=self.device, uneven=self.own.uneven_entries
        )

    def sharded(self) -> Outcome:
        """Run this rank's part, forward and backward, as in training.

        Raises:
            SequenceParallelError: it fails; on all ranks together.
        """
        try:
            with (
                together(),
                isolated(self.module, self.device),
                gathered(self.module, self.own.uneven_entries),
                self.context.drawn_from(SEED),
                recorded_numbers(self.module) as found,
            ):
                before = KeptValues(self.module, trains=True)
                self.context.noted_counts, self.context.noted_terms = [], []
                with self._named(), failing_together(self.module):
                    with (
                        self._as_the_whole(),
                        HiddenTerms(self.shown, follows=True) as terms,
                        TokenOutcomes(self._tokens(self.own, self.first_row), self.turned, follows=True) as outcomes,
                        numbers_read(self.module, self.context) as read,
                    ):
                        output = self.run_sharded()
                    loss = output["loss"] if isinstance(output, Mapping) else output
                    step = self.context.step or Step(batch=self.own)
                    gradients = self._gradients(loss)
                buffers, mesh = buffers_of(self.module), self.context.mesh
                found.handed(output if self.context.hands_outputs else None)
                found.attributes(self.module, self.control_group)
                alike = mesh.data_group if self.context.global_view else None
                found.metrics(self.module, alike, self.control_group, mesh.token_group)
                return Outcome(
                    loss=loss,
                    gradients=gradients,
                    buffers=buffers,
                    num_sums=step.num_sums,
                    num_over_groups=step.num_over_groups,
                    num_means=len(step.token_counts),
                    counts=tuple(self.context.noted_counts),
                    terms=tuple(self.context.noted_terms),
                    by_counts=bool(self.context.by_counts),
                    numbers=found.numbers,
                    keeps=bool(before.new()),
                    shapes=(shapes_of(leaves_of(output)), shapes_of(leaves_of(before.new()))),
                    hidden=terms.found,
                    read=read,
                    token_outcomes=outcomes.found,
                )
        except SequenceParallelError as error:
            error.ends_steps = True  # type: ignore[attr-defined]
            raise
        finally:
            self.context.step = None

    def _gradients(self, loss: Tensor | None) -> dict[str, Tensor | None]:
        with nullcontext() if loss is None else counted_terms(loss, self.context):
            return gradients_of(self.module, loss)

    @contextmanager
    def _as_the_whole(self) -> Iterator[None]:
        """Call each function as often as a whole run does, and in the forward alone, where one of its calls is to be told from the others."""
        with ExitStack() as stack:
            if self.shown or self.turned:
                stack.enter_context(without_checkpoints(self.module))
                stack.enter_context(without_tiles(self.module))
            yield

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Say of an error of the model's own that it comes of shards: whole the same step ran."""
        try:
            yield
        except (SequenceParallelError, comm.PeerError):
            raise
        except Exception as error:
            if comm.is_of_communication(error):
                raise  # another rank is late or has ended: nothing is known of the model
            if self.context.global_view:
                raise SequenceParallelError(
                    f"preflight: training_step runs on {self.crop} whole, and fails in the global view: {told_error(error)}"
                ) from error
            raise SequenceParallelError(
                f"preflight: training_step runs on {self.crop} whole, and fails on shards: {told_error(error)}; the model compares "
                "or counts something over all tokens of its input, of which it sees this rank's alone; do that on the whole batch, in the "
                "collate function say, or with lightning_sp.reductions; or use global_view=True, which shows the step whole sequences"
            ) from error

    def _tokens(self, batch: SequenceInfo, first_row: int) -> Tokens:
        rank = None if batch is self.batch else self.sequence_rank
        return Tokens.of_part(batch, self.own.layout, rank, first_row, once=self.turned_once)

    def numbers_of_whole(self, seed: int) -> Mapping[str, Number]:
        """Run the whole crop forward and return what it logs, each data-parallel group's counted once. Every rank must call it."""
        outcomes = TokenOutcomes(self._tokens(self.batch, 0), self.turned) if self.turned else nullcontext()
        with together(), self._alone(self.batch, seed), recorded_numbers(self.module) as found, outcomes:
            output = self.run_whole()
            found.attributes(self.module, self.control_group)
            found.handed(output if self.context.hands_outputs else None)
            found.metrics(self.module, self.context.mesh.data_group, self.control_group, self.context.mesh.token_group)
        return found.numbers

    def traced_whole(self, trace: Trace) -> float | None:
        """Run the whole crop forward, noting its calls, and return its loss; None where it has none, or fails."""
        with suppress(Exception), self._alone(self.batch, SEED), traced(self.module, trace):
            with HiddenTerms(self.shown):
                loss = _loss_of_whole(self.run_whole())
            return None if loss is None else float(loss)
        return None

    def traced_sharded(self, trace: Trace) -> float | None:
        """Run this rank's part forward, noting its calls, and return its loss; None where it has none, or a rank fails."""
        try:
            with (
                suppress(Exception),
                together(),
                isolated(self.module, self.device),
                gathered(self.module, self.own.uneven_entries),
                self.context.drawn_from(SEED),
                failing_together(self.module),
                traced(self.module, trace),
                self.context.logits_made_at_once(),
                self._as_the_whole(),
                HiddenTerms(self.shown, follows=True),
            ):
                output = self.run_sharded()
                loss = output["loss"] if isinstance(output, Mapping) else output
                return None if loss is None else float(loss)
        finally:
            self.context.step = None
        return None

    @contextmanager
    def _alone(self, batch: SequenceInfo, seed: int) -> Iterator[None]:
        with alone(self.module, self.context, batch, device=self.device, uneven=self.own.uneven_entries, seed=seed):
            yield


def attention_calls(
    module: nn.Module,
    context: SequenceContext,
    run: Callable[[], Any],
    batch: SequenceInfo,
    *,
    device: torch.device,
    uneven: bool,
) -> tuple[AttentionCall, ...] | None:
    """Return the attention calls of a step on a whole crop, forward alone; None where it fails on it.

    Args:
        module: the sharded module.
        context: its step in progress; switched off meanwhile.
        run: the step.
        batch: what the crop holds.
        device: where the module is.
        uneven: whether data-parallel groups hold other entries.
    """
    calls: list[AttentionCall] = []
    with (
        alone(module, context, batch, device=device, uneven=uneven),
        torch.no_grad(),
        module_stack(module) as stack,
        context.recorded(lambda q, k: calls.append(AttentionCall(stack.innermost, q, k))),
    ):
        try:
            with failing_together(module):
                run()
        except Exception:  # whatever a model makes of another length, on any rank: then nothing is known
            return None
    return tuple(calls)


@contextmanager
def alone(
    module: nn.Module,
    context: SequenceContext,
    batch: SequenceInfo,
    *,
    device: torch.device,
    uneven: bool,
    seed: int = SEED,
) -> Iterator[None]:
    """Let a whole batch run as on one device, without a trace; where it fails on one rank alone, the others do not wait for that one.

    Args:
        module: the sharded module.
        context: its step in progress; switched off meanwhile.
        batch: what the batch holds.
        device: where the module is.
        uneven: whether data-parallel groups hold other entries.
        seed: of every random stream, alike on all ranks.
    """
    with (
        isolated(module, device),
        gathered(module, uneven),
        context.inactive(batch),
        without_checkpoints(module),
        without_tiles(module),
        with_whole_weights(module),
        streams_from(seed, device),
        metrics_begin_anew(module),
        failing_together(module),
    ):
        yield


@contextmanager
def together() -> Iterator[None]:
    """Raise on every rank what one raises: the error of the first that has one of ours, else of the first that has any."""
    try:
        yield
    except Exception as error:
        told = comm.tell_failure(error)
        if told is None or told in (text_of(error), told_error(error)):
            raise
        if comm.is_of_communication(error) and comm.is_of_communication(RuntimeError(told)):
            raise  # each rank lost another in its own words
        raise SequenceParallelError(told) from error
    told = comm.tell_failure(None)
    if told is not None:
        raise SequenceParallelError(told)


def _loss_of_whole(output: Any) -> Tensor | None:
    loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
    if loss is not None and isinstance(output, Mapping) and "num_tokens" in output:
        return loss / torch.as_tensor(output["num_tokens"]).clamp(min=1)
    return loss
