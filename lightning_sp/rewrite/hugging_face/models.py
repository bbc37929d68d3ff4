"""Which modules are Hugging Face models, and whether their attention can be reached."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

# What a modeling file calls to attend.
_INTERFACE, _SDPA = "ALL_ATTENTION_FUNCTIONS.get_interface(", "scaled_dot_product_attention("
_TOKENS = {"input_ids", "inputs_embeds"}
# Of what T5's attention makes its bias of relative positions.
BIAS_ARGUMENTS = ["query_length", "key_length"]


def hugging_face_models(module: nn.Module) -> list[Any]:
    """Return the outermost Hugging Face models inside a module; empty without transformers."""
    # Whoever made such a model has imported this. To ask transformers itself for the class would import it, which takes seconds.
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return []
    found: list[Any] = []

    def visit(each: nn.Module) -> None:
        if isinstance(each, modeling.PreTrainedModel):
            found.append(each)
            return
        for child in each.children():
            visit(child)

    visit(module)
    return found


def own_class(module: nn.Module) -> type:
    """Return a module's class as its file defines it: FSDP2 makes it a subclass, in torch's own source file."""
    return next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))


def why_unreachable(model: Any) -> str:
    """Return why a model's attention cannot be reached, empty where it can: such a model takes batches without a sequence alone.

    What a tower does by itself is its own affair, for it runs whole: it is the tokens' attention that must be reached.
    """
    name, attention = own_class(model).__name__, _attention_of_tokens(model)
    if not _can_set(model):
        if attention and all(_INTERFACE in _source(each) for each in attention):
            return ""
        return (
            f"{name} does not reach its attention through Hugging Face's interface, so setting one is a silent no-op: it cannot be rewritten; "
            "use global_view=True, which carries attention that is written out, or a model whose modeling file calls ALL_ATTENTION_FUNCTIONS "
            "(Llama, Qwen, Mistral, Gemma, GPT-2, ...)"
        )
    if other := _other_relative_bias(model):
        return f"{other}, by blocks of its own, as LongT5: it cannot be rewritten; use global_view=True, which carries it, or T5 or UMT5"
    by_hand = [each.__name__ for each in attention if (source := _source(each)) and not _is_seen(source)]
    if by_hand:
        return (
            f"{name} has a part whose {by_hand[0]} writes attention out by hand: each rank would attend to its own tokens alone; use "
            "global_view=True, or a part whose modeling file calls ALL_ATTENTION_FUNCTIONS (BERT, RoBERTa, GPT-2, MBart, ...)"
        )
    return ""


def reachable_models(model: Any) -> list[Any]:
    """Return the outermost models within a model whose attention can be set: itself, or parts of it (its text model)."""
    if _can_set(model):
        return [model]
    inner = [each for child in model.children() for each in hugging_face_models(child)]
    return [found for each in inner for found in reachable_models(each)]


def _can_set(model: Any) -> bool:
    # Transformers reads the source file of the class to know.
    can_set = getattr(own_class(model), "_can_set_attn_implementation", None)
    return can_set is None or bool(can_set())


def _attention_of_tokens(model: nn.Module) -> list[type]:
    """Return the classes of the innermost attention modules outside of a model's towers."""
    found: dict[type, None] = {}

    def visit(module: nn.Module) -> bool:
        inside = [visit(child) for child in module.children() if not _is_tower(child)]
        kind = own_class(module)
        is_attention = "Attention" in kind.__name__ and not kind.__module__.startswith("torch.")
        if is_attention and not any(inside):
            found[kind] = None
        return is_attention or any(inside)

    visit(model)
    return list(found)


def _is_tower(module: nn.Module) -> bool:
    """Return whether a module is a model that takes neither ids nor embeddings of tokens."""
    if not isinstance(module, sys.modules["transformers.modeling_utils"].PreTrainedModel):
        return False
    taken = inspect.signature(module.forward).parameters
    # One that hands on whatever it is given may be given tokens.
    return _TOKENS.isdisjoint(taken) and not any(each.kind is each.VAR_POSITIONAL for each in taken.values())


def _other_relative_bias(model: nn.Module) -> str:
    """Return which module makes a bias of relative positions in another way than T5's, and of what; empty where none does."""
    for module in model.modules():
        made = getattr(module, "compute_bias", None)
        if callable(made) and list(inspect.signature(made).parameters)[:2] != BIAS_ARGUMENTS:
            return f"{own_class(module).__name__} makes its bias of {inspect.signature(made)}"
    return ""


def _is_seen(source: str) -> bool:
    return _INTERFACE in source or _SDPA in source


def _source(kind: type) -> str:
    """Return the source of the files of an attention class and those it inherits from; empty where one is not known."""
    modules = {each.__module__ for each in kind.__mro__ if not each.__module__.startswith(("torch.", "builtins"))}
    try:
        return "".join(inspect.getsource(sys.modules[name]) for name in modules)
    except (OSError, TypeError, KeyError):
        return ""
