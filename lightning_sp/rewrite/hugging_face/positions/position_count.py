"""How a Hugging Face model counts the positions of its tokens when it is given none: found by experiment, on 2 rows of 22 tokens.

    BY_ORDER       0, 1, 2, ... whatever the tokens are                          -> it is handed each rank's global positions
    FROM_ONE       1, 2, 3, ... likewise (PaliGemma)                             -> it is handed them, and 1 more
    BY_CUMSUM      by a cumulative sum of its ids or of its mask (RoBERTa, OPT)  -> it counts itself, over the whole sequence
    OWN_WAY        otherwise                                                     -> refused where its tokens are on several ranks

The model runs up to its first attention block on weights that are all zero and take no memory. What reaches its modules and its embedding
tables is recorded: untouched, with positions handed in, and on each half of the tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.overrides import TorchFunctionMode

from lightning_sp.rewrite.hugging_face.models import own_class

# A number that no width of a model has.
_ROWS, _TOKENS = 2, 22
_Records = dict[str, Tensor]
# Attributes of a module that stand before those of its class: checkpointed and compiled, they would run the model itself.
_REPLACED = ("forward", "_compiled_call_impl")
_CUMSUMS = (torch.cumsum, Tensor.cumsum)
# Behind the name of an error that ended a run, among what reached modules.
_FAILED = " ended it"


class PositionCount(Enum):
    """How a model counts the positions of its tokens."""

    BY_ORDER = "by their order"
    FROM_ONE = "by their order, from 1"
    BY_CUMSUM = "itself, by cumulative sums if at all"
    OWN_WAY = "in a way of its own"


class PositionCounts(NamedTuple):
    """How a model counts, given ids and given embeddings.

    Args:
        of_ids: as it is called with `input_ids`.
        of_embeddings: with `inputs_embeds`.
        were_seen: it ran on tokens alone; a model that asks for pictures too fails, both ways alike, and shows nothing.
    """

    of_ids: PositionCount
    of_embeddings: PositionCount
    were_seen: bool = True

    @property
    def with_handed_embeddings(self) -> PositionCounts:
        """Return it for a model whose embeddings are handed positions where it counts in a way of its own."""
        handed = [PositionCount.BY_CUMSUM if each is PositionCount.OWN_WAY else each for each in self[:2]]
        return self._replace(of_ids=handed[0], of_embeddings=handed[1])


def position_counts(model: Any, *, by_name: bool = False) -> PositionCounts:
    """Return how a model counts positions by itself. It is not changed, and no random number is drawn.

    Args:
        model: a Hugging Face model of one sequence; its parameters may be sharded.
        by_name: positions are handed to no model that does not name them: what else it takes goes to its layers.
    """
    names = inspect.signature(model.forward).parameters
    skeleton, padding, width = _skeleton(model, {}), _padding_id(model), _width(model)
    ids = _inputs(padding) if "input_ids" in names else []
    embeddings = [
        {
            **{name: value for name, value in each.items() if name != "input_ids"},
            "inputs_embeds": torch.zeros(_ROWS, _TOKENS, width),
        }
        for each in ids
        if width and "inputs_embeds" in names
    ]
    others = any(p.kind is p.VAR_KEYWORD for p in names.values()) and not by_name
    takes_positions = "position_ids" in names or others
    failed: list[bool] = []
    counts = [_count(skeleton, names, each, takes_positions, failed) for each in (ids, embeddings)]
    return PositionCounts(counts[0], counts[1], were_seen=not failed or not all(failed))


def _count(
    model: nn.Module,
    names: Mapping[str, inspect.Parameter],
    inputs: list[dict[str, Tensor | None]],
    takes_positions: bool,
    failed: list[bool],
) -> PositionCount:
    inputs_taken = [
        {name: value for name, value in each.items() if value is not None and name in names} for each in inputs
    ]
    runs = [(each, *_run(model, each, _Cumsums())) for each in inputs_taken]
    failed += [any(name.endswith(_FAILED) for name in whole) for _, whole, _ in runs]
    by_order = torch.arange(_TOKENS).expand(_ROWS, -1)
    ways: dict[PositionCount, dict[str, Tensor]] = {PositionCount.BY_CUMSUM: {}}
    if takes_positions:
        from_one = {PositionCount.FROM_ONE: {"position_ids": by_order + 1}}
        ways = {PositionCount.BY_ORDER: {"position_ids": by_order}, **ways, **from_one}
    for way, handed in ways.items():
        if all(_halves_agree(model, {**given, **handed}, whole, sums) for given, whole, sums in runs):
            return way
    return PositionCount.OWN_WAY


def _halves_agree(model: nn.Module, given: dict[str, Tensor], whole: _Records, sums: _Cumsums) -> bool:
    """Return whether each half of the tokens reaches the modules as it does in the whole."""
    for half in (slice(0, _TOKENS // 2), slice(_TOKENS // 2, _TOKENS)):
        local, _ = _run(model, {name: value[:, half] for name, value in given.items()}, sums.of_half(half))
        handed_through = {name for name in local if name not in whole and "position_ids" in name}
        expected = {name: _half_of(value, half) for name, value in whole.items()}
        if not _equal(expected, {name: value for name, value in local.items() if name not in handed_through}):
            return False
    return True


class _Cumsums(TorchFunctionMode):
    """Records cumulative sums along the tokens and lookups in embedding tables, or gives a half of the tokens that of the whole."""

    def __init__(self, whole: list[tuple[Tensor, Tensor]] | None = None, half: slice | None = None) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor]] = []
        self.lookups: list[Tensor] = []
        self._whole, self._half = whole, half

    def of_half(self, half: slice) -> _Cumsums:
        return _Cumsums(self.calls, half)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.embedding and isinstance(looked_up := args[0] if args else kwargs["input"], Tensor):
            self.lookups.append(looked_up)
        output = function(*args, **kwargs)
        if function not in _CUMSUMS or output.dim() != 2:
            return output
        given = args[0] if args else kwargs["input"]
        if self._whole is None or self._half is None:
            self.calls.append((given, output))
            return output
        number = len(self.calls)
        self.calls.append((given, output))
        if number < len(self._whole) and _same(self._whole[number][0][:, self._half], given):
            return self._whole[number][1][:, self._half]
        return output


class _ReachedError(Exception):
    """The first attention block was reached."""


def _run(model: nn.Module, given: dict[str, Tensor], cumsums: _Cumsums) -> tuple[_Records, _Cumsums]:
    """Run up to the first attention block and return what reached the modules, and the tables of embeddings."""
    records: _Records = {}
    with _recorded(model, records):
        try:
            # Of 22 tokens nothing is worth a compilation: transformers compiles the block masks of FlexAttention.
            with torch.no_grad(), torch.compiler.set_stance("force_eager"), cumsums:
                model(**given)
        except _ReachedError:
            pass
        except Exception as error:  # what a model makes of such a small input is its own; both ways it must do the same
            records[f"{type(error).__name__}{_FAILED}"] = torch.zeros(())
    for index, lookup in enumerate(cumsums.lookups):
        records[f"lookup {index}"] = lookup
    return records, cumsums


@contextmanager
def _recorded(model: nn.Module, records: _Records) -> Iterator[None]:
    """Record the tensors that each module is given; end the run at the first block with an attention in it."""
    blocks = {
        child
        for holder in model.modules()
        if isinstance(holder, nn.ModuleList)
        for child in holder
        if any("attn" in name.lower() or "attention" in name.lower() for name, _ in child.named_modules())
    }
    hooks = []
    for name, module in model.named_modules():
        if name and not isinstance(module, nn.Embedding):
            hooks.append(module.register_forward_pre_hook(_recorder(name, records, module in blocks), with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _recorder(name: str, records: _Records, ends: bool) -> Callable[..., None]:
    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Positions that a module is handed, or that it makes itself of ids: what counts is what it looks up.
        given = [(str(i), value) for i, value in enumerate(args)] + sorted(kwargs.items())
        for key, value in given if ends else []:
            for number, each in enumerate(value if isinstance(value, (tuple, list)) else (value,)):
                # Masks of queries and keys are `masks`' concern.
                if isinstance(each, Tensor) and each.dim() < 4:
                    records.setdefault(f"{name} {key} {number}", each)
        if ends:
            raise _ReachedError

    return record


def _skeleton(module: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a module of the same code whose parameters are zeros without memory, on the CPU, and whose hooks and compilation are gone."""
    if isinstance(module, OptimizedModule):
        return _skeleton(module._orig_mod, made)
    if module in made:
        return made[module]
    kind: Any = own_class(module)
    copy: nn.Module = kind.__new__(kind)
    made[module] = copy
    fresh = vars(nn.Module())
    kept = {name: value for name, value in vars(module).items() if name not in fresh and name not in _REPLACED}
    copy.__dict__.update({**fresh, **kept, "training": False})
    copy._parameters = {
        name: p if p is None else cast("nn.Parameter", torch.zeros((), dtype=p.dtype).expand(p.shape))
        for name, p in module._parameters.items()
    }
    copy._buffers = {name: b if b is None or b.is_meta else b.detach().cpu() for name, b in module._buffers.items()}
    copy._modules = {
        name: child if child is None else _skeleton(child, made) for name, child in module._modules.items()
    }
    return copy


def _width(model: Any) -> int:
    """Return the width of a model's embeddings, 0 where it is not known."""
    try:
        return int(model.get_input_embeddings().weight.shape[1])
    except (AttributeError, NotImplementedError, IndexError):
        return 0


def _padding_id(model: Any) -> int:
    found = [getattr(model.config.get_text_config(), "pad_token_id", None)]
    found += [each.padding_idx for each in model.modules() if isinstance(each, nn.Embedding)]
    return next((each for each in found if isinstance(each, int) and each >= 0), 0)


def _inputs(padding: int) -> list[dict[str, Tensor | None]]:
    """Return ids with and without padding, left in one row and right in the other, each with its mask and without."""
    tokens = torch.arange(_ROWS * _TOKENS).view(_ROWS, _TOKENS) % 5 + 2
    tokens = tokens + (tokens == padding).long()
    mask = torch.ones_like(tokens)
    mask[0, :3] = mask[1, 17:] = 0
    ids = tokens.masked_fill(mask == 0, padding)
    return [
        {"input_ids": tokens, "attention_mask": None},
        {"input_ids": ids, "attention_mask": None},
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": tokens, "attention_mask": mask},
    ]


def _half_of(value: Tensor, half: slice) -> Tensor:
    for dim, size in enumerate(value.shape):
        if size == _TOKENS:
            value = value.narrow(dim, half.start, _TOKENS // 2)
    return value


def _equal(one: _Records, other: _Records) -> bool:
    return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, be one of them written once for several rows."""
    if one.is_meta or other.is_meta:
        return one.shape == other.shape
    try:
        one, other = torch.broadcast_tensors(one, other)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return bool(torch.equal(one.double(), other.double())) if not one.is_complex() else bool(torch.equal(one, other))
