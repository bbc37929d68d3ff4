"""Tables of the vocabulary and output heads, split over ranks by their words: which can be, and their forwards.

    table    ids   -> a row of the rank that has the word, zeros of the others -> sum over the ranks
    head     x     -> copy to the ranks -> logits of own words                 -> a loss asks the others for three numbers of each token,
                                                                                  who reads logits gets them gathered

A loss reads a head without a call of its own, a part of the tokens at a time (`loss/output_head/head_call.py`): it finds this rank's words by
`vocabulary_part`. A preflight's whole run keeps to the parts, too, and its logits are whole: no rank ever has a whole table.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize.fsdp.units.module_calls import is_only_called
from lightning_sp.parallelize.tensor_parallel.plan import SplitLayers
from lightning_sp.parameter_names import shown, user_name
from lightning_sp.weights.vocabulary_part import VocabularyPart, remember_part

_EMBEDDING = F.embedding  # in the global view it is another for a step
# What may be read of a weight by a table's own forward.
_HARMLESS = {"dtype", "device", "shape"}


@dataclass(frozen=True)
class SplitVocabulary:
    """What is split of a model's vocabulary.

    Args:
        layers: tables and heads by name.
        whole: those that stay whole, and why.
    """

    layers: dict[str, nn.Module]
    whole: tuple[str, ...]

    @property
    def dims(self) -> dict[tuple[nn.Module, str], int]:
        """Return along which dim each parameter is split, by module and name."""
        return {(layer, name): 0 for layer in self.layers.values() for name in ("weight", "bias")}


def split_vocabulary(
    root: nn.Module, found: SplitLayers, given: Mapping[str, str] | None, size: int
) -> SplitVocabulary:
    """Return which tables and heads are split by their words: those that a given plan names, or all that models show. Equal on all ranks.

    Args:
        root: the LightningModule, whole.
        found: by its plan.
        given: the plan; None for the model's own.
        size: ranks.

    Raises:
        SequenceParallelError: a given plan names one that cannot be split.
    """
    names = {each: name for name, each in root.named_modules()}
    wanted = dict.fromkeys(found.vocabulary)
    if given is None:
        wanted |= dict.fromkeys(each for each in _shown_by_models(root) if each not in found.whole_tables)
    layers: dict[nn.Module, None] = {}
    whole: dict[str, None] = {}
    for each in wanted:
        tied = _tied(root, each)
        why = next(filter(None, (_why_whole(root, other, user_name(names[other]), size) for other in tied)), "")
        of_others = (
            ""
            if len(tied) == 1
            else f", which shares its weight with {shown([user_name(names[other]) for other in tied[1:]])}"
        )
        if why and given is not None:
            raise SequenceParallelError(
                f"tensor_parallel_plan splits the vocabulary of {user_name(names[each])}{of_others}: {why}; leave it out of the plan"
            )
        if why:
            whole[why] = None
        else:
            layers |= dict.fromkeys(tied)
    return SplitVocabulary({name: each for each, name in names.items() if each in layers}, tuple(whole))


def _shown_by_models(root: nn.Module) -> Iterator[nn.Module]:
    """Yield what models give by Hugging Face's `get_input_embeddings` and `get_output_embeddings`, if it holds a table, or a head."""
    kinds: dict[str, Any] = {"get_input_embeddings": nn.Embedding, "get_output_embeddings": (nn.Embedding, nn.Linear)}
    for each in root.modules():
        for getter, kind in kinds.items():
            if callable(get := getattr(each, getter, None)):
                with suppress(NotImplementedError, AttributeError):
                    layer = get()
                    if isinstance(layer, nn.Module) and any(isinstance(part, kind) for part in layer.modules()):
                        yield layer


def _tied(root: nn.Module, layer: nn.Module) -> list[nn.Module]:
    """Return the modules that have one of a layer's parameters, or one of theirs; the layer first."""
    found = [layer]
    for each in found:
        own = {id(parameter) for parameter in each._parameters.values() if parameter is not None}
        found += [
            other
            for other in root.modules()
            if other not in found and own & {id(p) for p in other._parameters.values()}
        ]
    return found


def _why_whole(root: nn.Module, layer: nn.Module, name: str, size: int) -> str:
    """Return why a table or a head cannot be split; empty if it can."""
    if not (_is_table(layer) or _is_linear(layer)):
        kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
        return f"{name} is a {kind}, and no nn.Linear or nn.Embedding without options, nor one that scales what it has looked up"
    weight = layer._parameters["weight"]
    assert weight is not None
    if weight.shape[0] % size:
        return f"tensor_parallel_size={size} does not divide the {weight.shape[0]} words of {name}"
    if any(layer is child for child in root.children()):
        return f"{name} is the LightningModule's own, whose weight a step may read without a call"
    if not is_only_called(root, layer):
        return f"a forward uses {name} in another way than by a call, and needs the whole weight"
    return ""


def _is_linear(layer: nn.Module) -> bool:
    plain = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    return plain and "forward" not in vars(layer) and not is_parametrized(layer)


def _is_table(layer: nn.Module) -> bool:
    """Return whether a module looks ids up in its weight, and does with what it found what it would do with any row."""
    if not isinstance(layer, nn.Embedding) or "forward" in vars(layer) or is_parametrized(layer):
        return False
    return not layer.scale_grad_by_freq and not layer.sparse and _looks_up(type(layer).forward)


def _looks_up(forward: Any) -> bool:
    """Return whether a forward is torch's own, or calls that of its base and reads of the weight what is the same of a part."""
    if forward is nn.Embedding.forward:
        return True
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    read = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "weight"]
    harmless = all(isinstance(up := parents[node], ast.Attribute) and up.attr in _HARMLESS for node in read)
    return harmless and any(isinstance(node, ast.Name) and node.id == "super" for node in ast.walk(tree))


def split_words(layer: nn.Module, axis: DeviceMesh, group: ProcessGroup) -> None:
    """Give a table or a head its forward on this rank's words. To be called before its parameters are split.

    Args:
        layer: of `SplitVocabulary.layers`.
        axis: of the mesh of parameters.
        group: the same ranks.
    """
    weight: Any = layer.weight
    words = len(weight) // axis.size()
    part = VocabularyPart(first=words * axis.get_local_rank(), words=words, total=len(weight), group=group)
    remember_part(layer, part)
    run = layer.forward
    if isinstance(layer, nn.Linear):
        layer.forward = lambda input: part.gathered(run(part.copied(input)))  # type: ignore[method-assign]
    else:
        layer.forward = partial(_looked_up, run, _OwnWords(layer, part))


def _looked_up(run: Callable[..., Tensor], own: _OwnWords, *args: Any, **kwargs: Any) -> Tensor:
    with own:
        return run(*args, **kwargs)


class _OwnWords(TorchFunctionMode):
    """Lets a table's forward look words up that several ranks have: of each rank its own, zeros for the others', added up.

    Args:
        table: whose weight holds this rank's words.
        part: which these are.
    """

    def __init__(self, table: nn.Module, part: VocabularyPart) -> None:
        super().__init__()
        self._table, self._part = table, part

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _EMBEDDING:
            return func(*args, **(kwargs or {}))
        table: Any = self._table
        rows, is_here = self._part.places(args[0])
        padding = None if table.padding_idx is None else table.padding_idx - self._part.first
        if padding is not None and not 0 <= padding < self._part.words:
            padding = None
        found = func(rows, table.weight, padding).masked_fill_(~is_here.unsqueeze(-1), 0)
        return self._part.sum(found)
