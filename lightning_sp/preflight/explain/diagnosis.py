"""Why a step on shards gives another result: the first call that does, found on the crop, and proven by handing it the whole's result.

whole    embed -> norm -> conv -> ... -> loss
shards   embed -> norm -> CONV -> ... -> loss       equal before it, another after it: hand it the whole's, and look again
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_sp import comm
from lightning_sp.preflight.explain.causes import TELLING, Cause, cause_of
from lightning_sp.preflight.recording.trace import Event, Key, Summary, Trace
from lightning_sp.preflight.trial import Trial

# Causes looked for, one after the other.
_MOST = 3
# They make room for neighbours.
_MAKES_ROOM = frozenset(("pad", "cat", "concat", "unfold"))
# One of several products, or the first step of something larger.
_IN_PARTS = _MAKES_ROOM | {"matmul", "__matmul__", "bmm", "baddbmm", "einsum"}
# They make tensors of the input's length that hold nothing of its tokens, or lay the same numbers out anew.
_NEUTRAL = frozenset(
    (
        *(
            "ones",
            "zeros",
            "full",
            "empty",
            "eye",
            "tril",
            "triu",
            "new_zeros",
            "new_ones",
            "new_full",
            "new_empty",
            "ones_like",
            "zeros_like",
        ),
        *(
            "view",
            "view_as",
            "reshape",
            "flatten",
            "unflatten",
            "transpose",
            "permute",
            "movedim",
            "expand",
            "expand_as",
            "contiguous",
            "clone",
        ),
        *(
            "copy_",
            "squeeze",
            "unsqueeze",
            "to",
            "type",
            "float",
            "double",
            "half",
            "bfloat16",
            "long",
            "set_",
            "detach_",
            "record_stream",
        ),
    )
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause, where it is, the two lines that make it exact, and whether the losses agree once its call is handed the whole's result."""

    cause: Cause
    where: str
    code: str
    settles: bool

    def describe(self) -> str:
        """Return one line."""
        proof = "handed the whole's result there, the losses agree" if self.settles else "and not that alone"
        code = f". Two lines make it exact: {self.code}" if self.code else ""
        return f"{self.cause.what}: {self.where} ({proof}). Fix: {self.cause.fix}{code}"


def find_causes(trial: Trial, tolerance: float) -> list[Finding]:
    """Return what makes a step on shards give another result, the first first. Every rank must call it.

    Communicates: what a few forwards do, and a gather of the first call that differs on each rank.
    """
    findings: list[Finding] = []
    captured: dict[Key, Any] = {}
    for _ in range(_MOST):
        whole = Trace(rows=trial.batch.rows, tokens=trial.batch.length, captured=dict.fromkeys(captured))
        loss = trial.traced_whole(whole)
        local = Trace(rows=trial.own.rows, tokens=trial.context.local_tokens(trial.own), like=whole)
        local.replaced = {key: _own_part(value, trial, whole) for key, value in whole.captured.items()}
        sharded_loss = trial.traced_sharded(local)
        settled = loss is not None and sharded_loss is not None and _close(loss, sharded_loss, tolerance)
        if findings:
            findings[-1] = replace(findings[-1], settles=settled)
        if settled and findings:
            break
        key = _first_difference(trial, whole, local, tolerance)
        if key is None or key in captured:
            break
        named = _named(whole, key)
        event = whole.events[named]
        cause = cause_of(event, local.events.get(named, event), (whole.rows, local.rows), _reads_a_table)
        findings.append(Finding(cause=cause, where=_where(event), code=cause.two_lines(event), settles=False))
        # What makes room for a neighbour, or is one of several products, is replaced as a whole: by its module's result.
        own = Key(key.module, "", 0)
        captured[own if event.key.function in _IN_PARTS and own in whole.events else key] = None
    return findings


def _first_difference(trial: Trial, whole: Trace, local: Trace, tolerance: float) -> Key | None:
    """Return the first call of any rank whose inputs are equal and whose result is another; None where some rank does not make it.

    Ranks may call other functions in a whole run, too: what is made of weights goes by their shards.
    """
    order = {key: index for index, key in enumerate(whole.events)}
    own = len(order)
    for each, event in whole.events.items():
        other = local.events.get(each)
        if other is None or each.function in _NEUTRAL or each in local.replaced or not event.outputs:
            continue
        if _agree(trial, event.inputs, other.inputs, tolerance) and not _agree(
            trial, event.outputs, other.outputs, tolerance
        ):
            own = order[each]
            break
    names = [*order, None]
    key: Key | None = min(comm.gather_objects((own, names[own])), key=lambda each: each[0])[1]
    return key if all(comm.gather_objects(key in order)) else None


def _named(whole: Trace, key: Key) -> Key:
    """Return the call that tells most of a difference: of a module, or of what makes room for neighbours, the first known one after it."""
    order = list(whole.events)
    if key.function == "__getitem__":
        # Slices that are joined again: a shift.
        joined = [k for k in order[order.index(key) :] if k.module == key.module and k.function in _MAKES_ROOM]
        return joined[0] if joined else key
    if key.function and key.function not in _MAKES_ROOM:
        return key
    inside = order[order.index(key) :] if key.function else order[: order.index(key)]
    for each in inside:
        within = not key.module or each.module == key.module or each.module.startswith(f"{key.module}.")
        if within and each.function in TELLING:
            return each
        if each == Key(key.module, "", key.number if not key.function else 0):
            break
    return key


def _agree(trial: Trial, whole: tuple[Summary, ...], local: tuple[Summary, ...], tolerance: float) -> bool:
    return len(whole) == len(local) and all(_same(trial, *pair, tolerance) for pair in zip(whole, local, strict=True))


def _same(trial: Trial, whole: Summary, local: Summary, tolerance: float) -> bool:
    if (whole.dim is None) != (local.dim is None):
        return False
    a, b = whole.values, local.values
    if a.shape[0] == trial.batch.rows and b.shape[0] == trial.own.rows:
        a = a[trial.first_row : trial.first_row + trial.own.rows]
    if whole.dim is not None:
        positions = trial.positions
        real = positions < trial.batch.length
        if b.shape[1] != len(positions):
            return False
        a, b = a[:, positions[real]], b[:, real]
        if trial.batch.attention_mask is not None and a.shape[0] == trial.own.rows:
            # What a padding token holds is its own.
            seen = trial.batch.attention_mask.cpu()[trial.first_row :][: len(a)][:, positions[real]] != 0
            a, b = a * seen, b * seen
    if a.shape != b.shape:
        return False
    return _near(a, b, tolerance)


def _near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a - b).norm() <= tolerance * a.norm().clamp(min=1e-30))


def _close(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), 1e-30)


def _own_part(value: Any, trial: Trial, whole: Trace) -> Any:
    """Return this rank's part of a result of the whole run."""
    if isinstance(value, (tuple, list)):
        parts = [_own_part(each, trial, whole) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if not isinstance(value, Tensor):
        return value
    rows, tokens = whole.rows, whole.tokens
    index = trial.positions.clamp(max=tokens - 1).to(value.device)
    if value.dim() and value.shape[0] == rows * tokens:
        split = value.reshape(rows, tokens, *value.shape[1:])[trial.first_row : trial.first_row + trial.own.rows]
        return split.index_select(1, index).flatten(0, 1)
    if value.dim() and value.shape[0] == rows:
        value = value[trial.first_row : trial.first_row + trial.own.rows]
    for dim, size in enumerate(value.shape):
        if size == tokens and (dim > 0 or rows != tokens):
            return value.index_select(dim, index)
    return value


def _reads_a_table(event: Event) -> bool:
    """Return whether a call makes tokens of what has none: a slice of a table of positions."""
    reads = event.key.function in ("__getitem__", "narrow", "index_select", "split", "chunk")
    return reads and bool(event.inputs) and event.inputs[0].dim is None and event.outputs[0].dim is not None


def _where(event: Event) -> str:
    module, function, _ = event.key
    name = f"{module} ({event.kind})" if module else "training_step"
    return name if not function else f"{name}, {function}"
