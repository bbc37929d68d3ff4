"""A captured graph of a user's functions, on tensors that show whole sequences, made into one of this rank's part.

    Dynamo's graph      functions of torch, as the user called them, before autograd
    `LocalGraph`        called with SequenceTensors: takes them apart, calls what follows, puts them together again
    a variant           this rank's tensors in and out; the rules of the table run while it is traced, and are not there afterwards
    a backend's code    "inductor", "aot_eager": what it makes of the functions that the rules called, the project's collectives among them

What cannot be traced so runs function by function under the same rules, as without a compiler.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from lightning_sp.global_view.calls.taken_tokens import VIEWS, TakenTokens
from lightning_sp.global_view.compiled.fallback import reason_of
from lightning_sp.global_view.compiled.known_masks import KnownMasks
from lightning_sp.global_view.compiled.saved import Backend, compiled_within, recomputed
from lightning_sp.global_view.compiled.written_inputs import copy_of_written, shares_what_it_writes, written_inputs
from lightning_sp.global_view.compiled.written_nodes import written_nodes
from lightning_sp.global_view.masks.known_numbers import KnownNumbers, note_numbers
from lightning_sp.global_view.rules.attention.written_attention import Scores
from lightning_sp.global_view.tensors.placement import Placement, Storage
from lightning_sp.global_view.tensors.sequence_tensor import GlobalTensor, SequenceTensor
from lightning_sp.global_view.tensors.traced import without_step


@dataclass(frozen=True, kw_only=True)
class _Output:
    """What a traced output is: of an input's storage, so many tokens longer than another input; no placement for what is whole."""

    placement: Placement | None
    storage: int = 0
    like: int = 0
    longer: int = 0


class Run(Protocol):
    """What a graph asks of the run that calls it."""

    @property
    def recomputes(self) -> str:
        """What the backward computes again: "full", "selective", "budget_<percent>", "matmuls", or empty for what the backend chooses."""

    def buffers(self) -> set[int]:
        """Return the ids of the buffers of the module that runs."""

    def note(self, reason: str) -> None:
        """Say why a graph runs function by function."""


class LocalGraph:
    """A graph that Dynamo captured, called with whole sequences. A class because its variants are compiled as they are needed.

    Args:
        graph: of functions of torch.
        backend: compiles a graph of this rank's tensors; the name of one of torch's, or a function.
        run: what is known of the run that calls it.
    """

    def __init__(self, graph: GraphModule, backend: str | Backend, run: Run) -> None:
        self._graph, self._backend, self._of_run = graph, backend, run
        self._masks = KnownMasks(graph)
        self._variants: dict[Any, _Variant] = {}
        self._reason = _why_not(graph)
        if self._reason:
            run.note(self._reason)

    def __call__(self, *args: Any) -> Any:
        """Run it on real tensors, in the order of the graph's placeholders."""
        if self._reason or any(map(_is_slice, args)):
            return self._by_functions(args)  # what is written to a slice is written to its source
        names, masks, kind = self._masks.of(args, self._of_run.buffers)
        recomputes = self._of_run.recomputes
        key = kind, recomputes
        if key not in self._variants:
            self._variants[key] = _Variant(self._graph, names, self._backend, recomputes)
        variant = self._variants[key]
        try:
            return variant(args, masks)
        except Exception as error:
            if not variant.failure and not _is_of_compiler(error):
                raise
            self._reason = variant.failure or reason_of(error)
        self._of_run.note(self._reason)
        return self._by_functions(args)

    def _by_functions(self, args: Sequence[Any]) -> Any:
        return _Functions(self._graph).run(*args)


class _Functions(Interpreter):
    """Calls a graph's functions one after the other, so that the rules see each."""

    def __init__(self, graph: GraphModule, given: dict[str, Any] | None = None) -> None:
        super().__init__(graph)
        self._given = given or {}
        self.at: Any = None
        # What has tokens of a sequence that it is a view of on one device: a tensor that a compiler traces does not tell.
        self._taken: set[Node] = set()

    def run_node(self, n: Node) -> Any:
        """Run one, but what is known before."""
        self.at = n
        if n.name in self._given:
            return self._given[n.name]
        of_sequence = any(
            each in self._taken or isinstance(self.env[each], SequenceTensor) for each in n.all_input_nodes
        )
        # A copy that knows what it is of writes to the sequence itself; one that a compiler traces is not known to it.
        if any(not isinstance(self.env[each], TakenTokens) for each in self._taken.intersection(written_nodes(n))):
            raise NotImplementedError("global_view: a write to a token of the sequence: not compiled")
        result = super().run_node(n)
        if of_sequence and not isinstance(result, SequenceTensor) and _function_of(n) in VIEWS:
            self._taken.add(n)
        return result

    def gives_taken_tokens(self) -> bool:
        """Return whether the graph gives such a view: what is written to its source later must be seen in it. Its line is that in progress."""
        output: Node = self.at
        found = [each for each in output.all_input_nodes if each in self._taken]
        self.at = found[0] if found else output
        return bool(found)

    def line(self) -> str:
        """Return the user's line that the node in progress comes of."""
        trace = [each.strip() for each in str(self.at.meta.get("stack_trace") or "").splitlines() if each.strip(" ^~")]
        return ": ".join(trace[-2:]) or "a line that is not known"


def _function_of(node: Node) -> str:
    """Return the name of what a node calls, without underscores around it."""
    return str(node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")).strip("_")


def _is_of_compiler(error: Exception) -> bool:
    """Return whether code was not made, so that nothing ran: not what code that was made raises."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException)


def _why_not(graph: GraphModule) -> str:
    """Return what a graph holds that no variant is made of; empty for nothing."""
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, GlobalTensor) and not isinstance(value, SequenceTensor):
            return "scores of an attention come from another graph"
        if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            return f"it holds {node.target}"
    return "it writes to memory that others have, too" if shares_what_it_writes(graph) else ""


class _Variant:
    """The graph of this rank for masks of one kind."""

    def __init__(self, graph: GraphModule, masks: Sequence[str], backend: str | Backend, recomputes: str) -> None:
        self.failure = ""
        self._graph, self._masks, self._recomputes = graph, masks, recomputes
        self._placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        written = written_inputs(graph)
        self._written = [i for i, node in enumerate(self._placeholders) if node in written]
        self._reductions = 0
        self._running: _Functions | None = None
        self._outputs: list[_Output] | None = None
        self._sources: list[Storage] = []
        self._spec: Any = None
        self._args: Sequence[Any] = ()
        self._real_masks: Sequence[Tensor] = ()

        def local(*flat: Any) -> Any:
            try:
                return self._traced(flat)
            except Exception as error:
                line = "" if self._running is None else f" ({self._running.line()})"
                self.failure = f"{type(error).__name__}: {str(error).splitlines()[0]}{line}"
                raise

        allowed: Any = torch.compiler.allow_in_graph
        allowed(local)  # traced through, by what differentiates it

        def entry(*flat: Any) -> Any:
            return local(*flat)

        # Dynamo keeps what it compiled by the code: each variant has its own.
        own = types.FunctionType(
            entry.__code__.replace(co_name="local_graph"), entry.__globals__, "local_graph", None, entry.__closure__
        )
        self._run = torch.compile(own, backend=partial(compiled_within, recomputes, backend), fullgraph=True)

    def __call__(self, args: Sequence[Any], masks: Sequence[Tensor]) -> Any:
        """Run it."""
        storages = _storages(args)
        self._args, self._real_masks, self._sources = args, masks, storages
        flat: list[Any] = []
        for storage in storages:
            device = next(
                each.device for each in args if isinstance(each, SequenceTensor) and each.placement.storage is storage
            )
            positions = storage.positions(device)
            torch._dynamo.maybe_mark_dynamic(positions, 0)
            flat.append(positions)
        for mask in masks:
            _mark_lengths(mask, storages)
            flat.append(mask)
        for each in args:
            if isinstance(each, SequenceTensor):
                torch._dynamo.maybe_mark_dynamic(each.local, each.placement.dim)
                flat.append(each.local)
            else:
                flat.append(_as_size(each) if _is_size(each) else each)
        try:
            outputs = self._run(*flat)
        finally:
            self._args, self._real_masks = (), ()
        for _ in range(self._reductions):
            storages[0].note_reduction()
        return self._shown(outputs, args, storages)

    def _traced(self, flat: Sequence[Any]) -> Any:
        """Run the graph under the rules, on tensors that a compiler traces."""
        storages = self._sources
        positions, rest = flat[: len(storages)], flat[len(storages) :]
        masks, rest = rest[: len(self._real_masks)], rest[len(self._real_masks) :]
        rest = [each.shape[0] if _is_size(real) else each for each, real in zip(rest, self._args, strict=True)]
        self._reductions = 0

        def note() -> None:
            self._reductions += 1

        made: dict[int, Storage] = {}
        inner: list[Any] = []
        for node, given, real in zip(self._placeholders, rest, self._args, strict=True):
            if not isinstance(real, SequenceTensor):
                inner.append(given)
                continue
            own = real.placement
            number = next(i for i, each in enumerate(storages) if each is own.storage)
            per_token = own.outer * own.inner
            held = given.shape[own.dim] // per_token if per_token > 1 else given.shape[own.dim]
            if number not in made:
                made[number] = replace(
                    without_step(own.storage, held * own.storage.layout.size),
                    note_reduction=note,
                    _positions={given.device: positions[number]},
                )
            storage = made[number]
            length = self._length(node, own, rest, storage)
            inner.append(SequenceTensor(given, replace(own, storage=storage, length=length, copied=None)))
        given_masks = dict(zip(self._masks, masks, strict=True))
        for mask, real_mask in zip(masks, self._real_masks, strict=True):
            note_numbers(mask, real_mask)
        with KnownNumbers(GlobalTensor), recomputed(self._recomputes) if self._recomputes else nullcontext():
            copies = [copy_of_written(each) if i in self._written else each for i, each in enumerate(inner)]
            self._running = _Functions(self._graph, given_masks)
            result = self._running.run(*copies)
            for i in self._written:
                inner[i].copy_(copies[i])
            if self._running.gives_taken_tokens():
                raise NotImplementedError("a token of the sequence leaves the graph")
            self._running = None
        leaves, self._spec = torch.utils._pytree.tree_flatten(result)
        outputs = [_output_of(each, inner, list(made.values()), list(made)) for each in leaves]
        if self._outputs not in (None, outputs):
            raise NotImplementedError("what the graph gives depends on more than its inputs' kinds")
        self._outputs = outputs
        return tuple(each.local if isinstance(each, SequenceTensor) else each for each in leaves)

    def _length(self, node: Node, own: Placement, rest: Sequence[Any], storage: Storage) -> Any:
        """Return how many tokens a tensor shows: all that the ranks hold, or the input that Dynamo has for it."""
        if not own.has_padding:
            return storage.capacity
        length = node.meta["example_value"].placement.length
        if not isinstance(length, torch.SymInt):
            return length
        for each, given in zip(self._placeholders, rest, strict=True):
            value = each.meta.get("example_value")
            if isinstance(value, torch.SymInt) and value.node.expr == length.node.expr:
                return given
        raise NotImplementedError("a padded sequence whose length is not among the graph's inputs")

    def _shown(self, outputs: Sequence[Any], args: Sequence[Any], storages: Sequence[Storage]) -> Any:
        sequences = [each for each in args if isinstance(each, SequenceTensor)]
        leaves = []
        assert self._outputs is not None
        for each, known in zip(outputs, self._outputs, strict=True):
            if known.placement is None:
                leaves.append(each)
                continue
            length = sequences[known.like].placement.length + known.longer
            place = replace(known.placement, storage=storages[known.storage], length=length)
            leaves.append(SequenceTensor(each, place))
        return torch.utils._pytree.tree_unflatten(leaves, self._spec)


def _is_slice(value: Any) -> bool:
    return isinstance(value, TakenTokens) or (isinstance(value, SequenceTensor) and value.placement.copied is not None)


def _output_of(value: Any, inner: Sequence[Any], storages: Sequence[Storage], numbers: Sequence[int]) -> _Output:
    if isinstance(value, Scores) or (isinstance(value, GlobalTensor) and not isinstance(value, SequenceTensor)):
        raise NotImplementedError("scores of an attention leave the graph")
    if _is_slice(value):
        raise NotImplementedError("a slice of the sequence, or a token of it, leaves the graph")
    if not isinstance(value, SequenceTensor):
        return _Output(placement=None)
    own = value.placement
    sequences = [each for each in inner if isinstance(each, SequenceTensor)]
    number = next((n for n, each in zip(numbers, storages, strict=True) if each is own.storage), None)
    longer = [_constant(own.length - each.placement.length) for each in sequences]
    like = next((i for i, each in enumerate(longer) if each is not None), None)
    if like is None or number is None:
        raise NotImplementedError("an output of the graph is of another length than its inputs")
    # Not what the trace made: it goes with the trace.
    kept: Any = replace(own, storage=None, length=0, copied=None, outer=int(own.outer), inner=int(own.inner))  # type: ignore[arg-type]
    return _Output(placement=kept, storage=number, like=like, longer=int(longer[like] or 0))


def _constant(value: Any) -> int | None:
    """Return a number that is the same for all lengths, None for any other."""
    found: int | None = value.node.maybe_as_int() if isinstance(value, torch.SymInt) else value
    return found


def _storages(args: Sequence[Any]) -> list[Storage]:
    found: list[Storage] = []
    for each in args:
        if isinstance(each, SequenceTensor) and not any(each.placement.storage is other for other in found):
            found.append(each.placement.storage)
    return found


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _as_size(number: int) -> Tensor:
    """Return a tensor without memory whose size says a number: a compiler takes that for a symbol at once, a number when it has changed."""
    size = torch.empty(number, 0)
    torch._dynamo.maybe_mark_dynamic(size, 0)
    return size


def _mark_lengths(tensor: Tensor, storages: Sequence[Storage]) -> None:
    lengths = {storage.sequence.length for storage in storages} | {storage.capacity for storage in storages}
    for dim, size in enumerate(tensor.shape):
        if size in lengths and size > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
