"""The stages of an attention module's heads: its own forward with a stage's rows of the projections, up to the attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_sp.attention.spec.codec import AttentionSpec
from lightning_sp.attention.staged import StageInputs
from lightning_sp.context.head_stage import HeadStage
from lightning_sp.context.step import SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.staged_heads.structure import AttentionHeads, hooks

# What takes the place of a projection while a stage runs.
Projection = Callable[[Tensor], Tensor]


class _Reached(BaseException):
    """A stage's forward has come to its attention. Not an `Exception`, which a model might catch."""

    def __init__(self, inputs: StageInputs) -> None:
        self.inputs = inputs


class Arguments:
    """What a module was given, its tensors apart: those are autograd's to save, and nothing else may hold them until the backward."""

    def __init__(self, tensors: Sequence[Tensor | None], others: Sequence[Any], form: TreeSpec) -> None:
        self._is_tensor = [each is not None for each in tensors]
        self._others, self._form = others, form

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, list[Tensor]]:
        """Return the arguments without their tensors, and these."""
        leaves, form = tree_flatten((args, kwargs))
        tensors = [each if isinstance(each, Tensor) else None for each in leaves]
        others = [None if isinstance(each, Tensor) else each for each in leaves]
        return cls(tensors, others, form), [each for each in tensors if each is not None]

    def whole(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return them with tensors again."""
        given = iter(tensors)
        leaves = [next(given) if there else each for there, each in zip(self._is_tensor, self._others, strict=True)]
        args, kwargs = tree_unflatten(leaves, self._form)
        return args, kwargs


class Stages:
    """An attention module's forward, for some of its heads.

    Args:
        context: with a step in progress while a stage runs.
        module: the attention module.
        heads: of it, in stages.
    """

    def __init__(self, context: SequenceContext, module: nn.Module, heads: AttentionHeads) -> None:
        self.context, self.module, self.heads = context, module, heads
        self.forward: Callable[..., Any] = module.forward

    def inputs(self, stage: int, projections: Sequence[Projection], args: Any, kwargs: Any) -> StageInputs:
        """Run the forward of a stage up to its attention, and return what that is given.

        Args:
            stage: its number.
            projections: what stands for those of q, k and v.
            args: of the forward.
            kwargs: likewise.
        """
        if self.context.step is None:
            self.refuse_unreached()  # a backward after its step
        # Once for each forward, and not for the backward's.
        is_first = stage == 0 and not torch.is_grad_enabled()
        try:
            with self.running(projections, HeadStage(operator=_reach, is_first=is_first)):
                self.forward(*args, **kwargs)
        except _Reached as found:
            inputs = found.inputs
        else:
            self.refuse_unreached()
        self._check(inputs)
        return inputs

    @contextmanager
    def running(self, projections: Sequence[Projection], stage: HeadStage) -> Iterator[None]:
        """Let the module have the heads of a stage."""
        changed: list[tuple[Any, dict[str, Any]]] = [
            *((own, {"forward": each}) for own, each in zip(self.heads.projections, projections, strict=True)),
            (self.module, self.heads.attributes(self.module)),
        ]
        before = [{name: vars(own)[name] for name in values if name in vars(own)} for own, values in changed]
        assert self.context.head_stage is None
        try:
            for own, values in changed:
                for name, value in values.items():
                    setattr(own, name, value)
            self.context.head_stage = stage
            yield
        finally:
            self.context.head_stage = None
            for (own, values), earlier in zip(changed, before, strict=True):
                for name in values:
                    if name in earlier:
                        setattr(own, name, earlier[name])
                    else:
                        delattr(own, name)

    def is_looked_at(self) -> bool:
        """Return whether a search for what is not finite looks at the module's parts.

        Raises:
            SequenceParallelError: a hook that was registered after the modules were looked at. On the rank that has it.
        """
        found = hooks(self.heads)
        for part, where in found:
            if not where.startswith("lightning_sp."):
                raise SequenceParallelError(
                    f"stage_inputs='recomputed': {type(self.module).__name__}: its {part} has a hook, which would see some heads alone; "
                    "register it before the fit, so that the module runs whole, or use stage_inputs='saved'"
                )
        return any(where.endswith(".non_finite") for _, where in found)

    def refuse_unreached(self) -> NoReturn:
        """Refuse a forward that did not come to its attention. Equal on all ranks."""
        raise SequenceParallelError(
            f"stage_inputs='recomputed': {type(self.module).__name__} made no attention call that lightning_sp could see, in a step or in its "
            "backward; use stage_inputs='saved', or call backward before the step has ended"
        )

    def refuse_output(self, num_tensors: int) -> NoReturn:
        """Refuse a forward that returns more than its output. Equal on all ranks."""
        raise SequenceParallelError(
            f"stage_inputs='recomputed': {type(self.module).__name__} returns {num_tensors} tensors: what it returns beside its output may be "
            "of some heads alone; use stage_inputs='saved'"
        )

    def _check(self, inputs: StageInputs) -> None:
        """Refuse a stage whose attention is not of the stage's heads. Equal on all ranks."""
        heads, stages = self.heads, self.heads.num_stages
        found, expected = (inputs.q.shape[1], inputs.k.shape[1]), heads.num_heads // stages
        # Keys may be repeated for their query heads.
        if found[0] != expected or found[1] not in (expected, heads.num_kv_heads // stages):
            raise SequenceParallelError(
                f"stage_inputs='recomputed': {type(self.module).__name__} attends with {found[0]} query and {found[1]} key-value heads in a "
                f"stage of {expected} and {heads.num_kv_heads // stages}: {_NOT_HEADS}"
            )

    def check_heads(self, x: Tensor, args: Any, kwargs: Any) -> None:
        """Refuse a module in which a head is made of other rows than its own, or attends to the keys of another. Equal on all ranks.

        Two runs up to the attention, without a product or a message: once all rows are 1, once the first head's are not. The first head of
        queries may differ then, and the query heads that share the first head of keys; any other may not.
        """
        # At least two key-value heads, for one says nothing.
        few = next(
            n
            for n in range(self.heads.num_stages, 0, -1)
            if self.heads.num_kv_heads % n == 0 and self.heads.num_kv_heads // n > 1
        )
        trial = Stages(self.context, self.module, replace(self.heads, num_stages=few))
        trial.forward = self.forward
        shared, kv_heads = self.heads.num_heads // self.heads.num_kv_heads, self.heads.num_kv_heads // few
        rows, dim = [own.out_features // few for own in self.heads.projections], self.heads.head_dim
        marks = [[partial(_marks, x, dim, marked, number) for number in rows] for marked in (False, True)]
        before = _random_states(x.device)
        found = [trial.inputs(1, each, args, kwargs) for each in marks]
        if not all(map(torch.equal, before, _random_states(x.device))):
            raise SequenceParallelError(
                f"stage_inputs='recomputed': {type(self.module).__name__} draws random numbers before its attention: each stage would draw its "
                "own, and others in the backward; use stage_inputs='saved'"
            )
        for name, plain, marked in zip("qkv", *(each[:3] for each in found), strict=True):
            allowed = 1 if name == "q" or plain.shape[1] == kv_heads else shared
            differs = (plain != marked).transpose(0, 1).flatten(1).any(1).tolist()
            if differs != [head < allowed for head in range(len(differs))]:
                raise SequenceParallelError(
                    f"stage_inputs='recomputed': {type(self.module).__name__}: the first head's rows of what makes {name} change its heads "
                    f"{[head for head, there in enumerate(differs) if there]}, and should {list(range(allowed))}: {_NOT_HEADS}"
                )


_NOT_HEADS = "its projections are not heads one after the other, each with its own keys; use stage_inputs='saved'"


def _random_states(device: torch.device) -> list[Tensor]:
    of_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *of_device]


def _marks(x: Tensor, head_dim: int, marked: bool, num_rows: int, _: Tensor) -> Tensor:
    """Return a projection whose rows of the first head are marked, without memory for tokens."""
    rows = x.new_ones(num_rows)
    if marked:
        rows[:head_dim] = torch.arange(2, head_dim + 2, dtype=x.dtype, device=x.device)
    return rows.expand(*x.shape[:-1], num_rows)


def _reach(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    raise _Reached(StageInputs(q, k, v, spec))
