"""Hugging Face models, through their attention interface, with a mask function of ours; nothing of the model is edited.

Each strategy registers its own pair of functions under its own name, bound to its context, and takes them back. A custom attention without
a registered mask function gets no mask at all, silently: ours receives every mask the model asks for. Windows, chunks and padding it hands
on as a value, and what it cannot carry it refuses by name. Positions are always handed in, the loss gets the labels that were shifted on the
whole sequence.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_sp.attention import AttentionMask
from lightning_sp.attention.mask import document_ids
from lightning_sp.context import BatchInfo, SequenceContext
from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.captured import check_whole_tensors
from lightning_sp.rewrite.dropout import attention_dropout
from lightning_sp.rewrite.explicit_mask import explicit_mask
from lightning_sp.rewrite.functional import attend
from lightning_sp.rewrite.relative_bias import bias_of_whole_sequences
from lightning_sp.rewrite.rotary import follow_all_positions
from lightning_sp.rewrite.whole import whole_attention

_numbers = itertools.count()
# Wrappers that only restate what the context knows: documents come from the whole batch's positions, not from a shard's.
_CAUSAL, _FULL = "causal_mask_function", "bidirectional_mask_function"
_WINDOW, _BOTH_WAYS = (
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
)
_CHUNKS = "chunked_overlay.<locals>.inner_mask"
_SIZED = (_WINDOW, _BOTH_WAYS, _CHUNKS)
_KNOWN = (_CAUSAL, _FULL, *_SIZED)
_MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_PACKED = ("packed_sequence_mask_function.<locals>.inner_mask",)
_WRAPPERS = ("and_masks.<locals>.and_mask", "remap_positions_for_packed_sequence.<locals>.")
# Added to the scores, in each model's eager attention.
_BIASES = ("position_bias", "attn_bias", "alibi")
_REFUSED_ARGUMENTS = (
    "sinks",
    "head_mask",
    "layer_head_mask",
    "cache",
)


def hugging_face_models(module: nn.Module) -> list[Any]:
    """Return the outermost Hugging Face models inside a module; empty without transformers."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    found: list[Any] = []

    def visit(each: nn.Module) -> None:
        if isinstance(each, transformers.PreTrainedModel):
            found.append(each)
            return
        for child in each.children():
            visit(child)

    visit(module)
    return found


class HuggingFaceRewrite(AbstractContextManager[None]):
    """Routes the attention, masks, positions and loss of a module's Hugging Face models through the context, until it exits.

    A class because it holds what it replaces until it is put back.
    """

    def __init__(self, context: SequenceContext, module: nn.Module) -> None:
        self.context = context
        self.models = hugging_face_models(module)
        self._undo = ExitStack()

    def __enter__(self) -> None:
        if not self.models:
            return
        # The interface refuses names with "sdpa", "flash", "flex" or "/".
        for model in self.models:
            _check_model(model)
            previous = model.config._attn_implementation
            name = f"sequence_parallel_{next(_numbers)}"
            _register(name, self.context, previous, self._undo)
            model.set_attn_implementation(name)
            self._undo.callback(model.set_attn_implementation, previous)
            hook = model.register_forward_pre_hook(
                partial(_hand_in_positions, self.context), with_kwargs=True, prepend=True
            )
            self._undo.callback(hook.remove)
            _wrap_loss(model, self.context, self._undo)
            _wrap_generate(model, self.context, self._undo)
            follow_all_positions(model, self.context, self._undo)
            bias_of_whole_sequences(model, self.context, self._undo)

    def __exit__(self, *_: object) -> None:
        self._undo.close()


def _register(name: str, context: SequenceContext, previous: str, undo: ExitStack) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415
    from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: PLC0415
    from transformers.masking_utils import sdpa_mask  # noqa: PLC0415

    masks = AttentionMaskInterface()

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if context.reference is not None:
            own = ("s_aux", "softcap", *_BIASES)
            if kwargs.get("dropout") or any(kwargs.get(name) is not None for name in own):
                # Torch's function would drop these, silently, and draw dropout of its own.
                return _dense(context, module, *args, **kwargs)
            # In the precision of the operator: the eager softmax computes in float32 even in a float64 model.
            return sdpa_attention_forward(module, *args, **kwargs)
        eager = getattr(sys.modules[_own_class(module).__module__], "eager_attention_forward", sdpa_attention_forward)
        return AttentionInterface().get_interface(previous, eager)(module, *args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        return (sdpa_mask if context.reference is not None else masks[previous])(*args, **kwargs)

    AttentionInterface.register(name, partial(_attention, context, attention))
    AttentionMaskInterface.register(name, partial(_mask, context, mask))
    for interface in (AttentionInterface, AttentionMaskInterface):
        undo.callback(interface._global_mapping.pop, name, None)


def _attention(
    context: SequenceContext, original: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Any, scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """One layer's attention. Shapes: query (B, H, s, D), key and value (B, K, s, D) -> (B, s, H, D)."""
    if context.step is None:
        result: tuple[Tensor, None] = original(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return result
    kind = type(module).__name__
    bias = None
    if attention_mask is not None and not isinstance(attention_mask, AttentionMask):
        if not isinstance(attention_mask, Tensor):
            raise SequenceParallelError(
                f"{kind} built an attention mask {_shape(attention_mask)} of its own: it cannot be carried"
            )
        attention_mask, bias = explicit_mask(context, attention_mask, f"{kind}'s attention mask")
    for argument in _REFUSED_ARGUMENTS:
        if kwargs.get(argument) is not None:
            raise SequenceParallelError(
                f"{kind} uses {argument}: it cannot be carried yet; without it the model would be silently wrong"
            )
    for argument in _BIASES:
        if kwargs.get(argument) is not None:
            bias = _added(bias, _bias(context, kwargs[argument], f"{kind}'s {argument}"))
    window = kwargs.get("sliding_window")
    if attention_mask is None and window is not None and context.step.batch.padded_length > int(window):
        raise SequenceParallelError(
            f"{kind} has a sliding window of {window} tokens and the sequence {context.step.batch.padded_length}, but the model asked for no "
            "mask with a window: which of the two this layer means is not known"
        )
    causal = kwargs.get("is_causal")
    causal = bool(getattr(module, "is_causal", True)) if causal is None else bool(causal)
    asked = context.step.causal_masks
    if asked and causal not in asked:
        raise SequenceParallelError(
            f"{kind} says is_causal={causal}, but the model asked for {'causal' if True in asked else 'full'} masks: the two must agree"
        )
    mask = context.step.masks[causal] if attention_mask is None else attention_mask
    out = attend(
        context,
        query,
        key,
        value,
        mask=mask,
        scale=scaling,
        sinks=kwargs.get("s_aux"),
        softcap=kwargs.get("softcap"),
        bias=bias,
        dropout_p=dropout,
    )
    return out.transpose(1, 2), None


def _bias(context: SequenceContext, given: Any, what: str) -> Tensor:
    found = explicit_mask(context, given, what)[1] if isinstance(given, Tensor) else None
    if found is None:
        raise SequenceParallelError(
            f"{what} {_shape(given)} is not floating point of the whole sequence: it cannot be carried; without it the model would be "
            "silently wrong"
        )
    return found


def _added(bias: Tensor | None, other: Tensor) -> Tensor:
    return other if bias is None else bias + other


def _dense(
    context: SequenceContext, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None, s_aux: Tensor | None = None,
    softcap: float | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """One layer's attention on a short whole sequence, by its definition. Shapes: as in `_attention`."""
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    bias = None
    for name in _BIASES:
        bias = bias if others.get(name) is None else _added(bias, others[name])
    out = whole_attention(
        query, key, value, attention_mask, bias=bias, causal=causal and attention_mask is None, scale=scaling, sinks=s_aux, softcap=softcap,
        dropout=attention_dropout(context, dropout),
    )  # fmt: skip
    return out.transpose(1, 2), None


def _mask(context: SequenceContext, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Receive every mask the model asks for: return it as a value, None where causal or full says it all."""
    step = context.step
    if step is None:
        return original(*args, **kwargs)
    batch = step.batch
    # A window that holds the whole sequence hides nothing.
    parts = [p for p in _mask_parts(kwargs.get("mask_function")) if p.size is None or p.size < batch.padded_length]
    hides = _hides_padding(batch, kwargs.get("attention_mask"))
    sizes: dict[str, int] = {}
    functions: list[_MaskFunction] = []
    # Where the model is not given the batch's padding mask, transformers does not count from it.
    counted = _counted_from(batch) if hides or not batch.mask_given else None
    for part in parts:
        if part.size is not None and not sizes and (part.name != _CHUNKS or counted is None):
            sizes[part.name] = part.size
        elif part.name not in (_CAUSAL, _FULL):
            functions.append(_mask_function(context, part, counted))
    causal = _CAUSAL in [part.name for part in parts]
    if not any(part.name not in _KNOWN for part in parts):
        step.causal_masks.add(causal)
    if not sizes and not hides and not functions:
        return None
    left, right = sizes.get(_WINDOW), sizes.get(_BOTH_WAYS)
    window = (right, right) if right is not None else (None if left is None else left - 1, None)
    mask = batch.mask(causal, window, sizes.get(_CHUNKS), hides_padding=hides)
    return replace(mask, mask_mod=_all_of(functions)) if functions else mask


def _mask_function(context: SequenceContext, part: _Part, start: Tensor | None) -> _MaskFunction:
    """Return a part of a mask as a function of global positions, counted from `start` where transformers does so.

    Raises:
        SequenceParallelError: it reads tensors of this rank's tokens.
    """
    assert context.step is not None
    batch, size = context.step.batch, part.size
    if part.name == _CHUNKS and size is not None:
        # Transformers' own reads where the shard's padding ends.
        begun = torch.zeros(batch.rows, batch.padded_length, dtype=torch.int64) if start is None else start
        begun = begun.to(_device(batch))
        return lambda row, head, query, key: (query - begun[row, query]) // size == (key - begun[row, key]) // size
    if part.name in _SIZED and size is None:
        raise SequenceParallelError(
            f"the model asks for a mask made of {part.name} of unknown size: it cannot be carried; without it the model would be silently wrong"
        )
    check_whole_tensors(context, part.function, f"the model's mask function {part.name}")
    if start is None or batch.mask_given or part.name in _KNOWN:
        function: _MaskFunction = part.function
        return function
    begins = start.to(_device(batch))
    return lambda row, head, query, key: part.function(row, head, query - begins[row, query], key - begins[row, key])


def _all_of(functions: list[_MaskFunction]) -> _MaskFunction:
    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = functions[0](row, head, query, key)
        for function in functions[1:]:
            seen = seen & function(row, head, query, key)
        return seen

    return mask_mod


def _device(batch: BatchInfo) -> torch.device:
    """Return where the step computes."""
    return torch.device("cpu") if batch.position_ids is None else batch.position_ids.device


def _counted_from(batch: BatchInfo) -> Tensor | None:
    """Return where each token's positions are counted from, None for the row's start: its document, or what padding leaves.

    Shapes: () -> (rows, S), int64, on the CPU.
    """
    if batch.boundaries is not None and not batch.mask_given and _counts_within_documents():
        starts = batch.boundaries.gather(1, document_ids(batch.boundaries, batch.padded_length))
        return starts.expand(batch.rows, -1)
    if batch.seen is not None:
        first = batch.seen.cpu().long().argmax(1)
    elif batch.valid is not None:
        first = batch.valid[:, 0]
    else:
        return None
    return first[:, None].expand(batch.rows, batch.padded_length) if bool(first.any()) else None


def _counts_within_documents() -> bool:
    """Whether this transformers gives mask functions the positions within a packed document."""
    from transformers import masking_utils  # noqa: PLC0415

    return hasattr(masking_utils, "remap_positions_for_packed_sequence")


def _hides_padding(batch: BatchInfo, padding: Tensor | None) -> bool:
    """Return whether the model hides padding, which must be the batch's: a rank sees a part of it."""
    if padding is None or (batch.mask_given and not batch.hides_keys):
        return False
    if not batch.hides_keys:
        if bool(padding.all()):
            return False
        raise SequenceParallelError(
            f"a padding mask {_shape(padding)} that hides tokens reached the model, and the batch has none: from a rank's part alone the whole "
            "is not known; give it as the batch's attention_mask"
        )
    assert batch.local_mask is not None
    if padding.shape != batch.local_mask.shape or not torch.equal(padding.bool(), batch.local_mask.bool()):
        raise SequenceParallelError(
            f"the padding mask {_shape(padding)} that reached the model is not the batch's attention_mask: one made in training_step cannot be "
            "carried; change the batch before it is sharded"
        )
    return True


@dataclass(frozen=True)
class _Part:
    """An elementary mask function: its name, itself, and the size of its window or chunk."""

    name: str
    function: Any
    size: int | None = None


def _mask_parts(function: Any) -> list[_Part]:
    """Return the elementary masks that a mask function is the intersection of."""
    name = getattr(function, "__qualname__", repr(function))
    if name in _PACKED:
        return []
    inner: list[Any] = []
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        inner += list(content) if isinstance(content, tuple) else [content]
    if name in _SIZED:
        sizes = [each for each in inner if isinstance(each, int)]
        return [_Part(name, function, sizes[0] if len(sizes) == 1 else None)]
    if not name.startswith(_WRAPPERS):
        return [_Part(name, function)]
    return [each for content in inner if callable(content) for each in _mask_parts(content)]


def _hand_in_positions(
    context: SequenceContext, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    batch = context.step.batch if context.step is not None else context.reference
    if batch is None:
        return None
    positions = batch.position_ids
    if kwargs.get("position_ids") is None and positions is not None:
        like = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
        kwargs["position_ids"] = positions if like is None else positions.to(like.device)
    # With a cache Hugging Face keeps every layer's keys and drops the documents of packed rows.
    kwargs["use_cache"] = False
    return args, kwargs


def _wrap_loss(model: Any, context: SequenceContext, undo: ExitStack) -> None:
    if "loss_function" not in dir(type(model)):
        return
    original = model.loss_function

    def loss_function(*args: Any, **kwargs: Any) -> Tensor:
        if context.step is not None:
            if getattr(original, "__name__", "") != "ForCausalLMLoss":
                raise SequenceParallelError(
                    f"{type(model).__name__} computes {getattr(original, '__name__', original)}: only ForCausalLMLoss, a mean over tokens, is "
                    "supported under sequence parallelism; compute the loss in training_step from the logits"
                )
            if context.step.batch.shift_labels is None:
                raise SequenceParallelError(
                    "the model computes its loss, but the batch has no 'labels' or 'shift_labels' that were sharded"
                )
            # Shifting a shard would lose the target at its edge: these were shifted on the whole sequence.
            kwargs["shift_labels"] = context.step.batch.shift_labels
        loss: Tensor = original(*args, **kwargs)
        return loss

    had = "_loss_function" in vars(model)
    model.loss_function = loss_function
    undo.callback(setattr, model, "_loss_function", original) if had else undo.callback(
        _delete, model, "_loss_function"
    )


def _wrap_generate(model: Any, context: SequenceContext, undo: ExitStack) -> None:
    if not hasattr(model, "generate"):
        return
    original = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        if context.step is not None:
            raise SequenceParallelError(
                "model.generate inside a step would continue this rank's shard: call it on whole sequences from a hook such as "
                "on_validation_epoch_end, on all ranks alike"
            )
        return original(*args, **kwargs)

    model.generate = generate
    undo.callback(_delete, model, "generate")


def _delete(target: Any, name: str) -> None:
    if name in vars(target):
        delattr(target, name)


def _own_class(module: nn.Module) -> type:
    """Return a module's class from before FSDP2 put a subclass of its own, in torch's own source file, in its place."""
    return next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))


def _check_model(model: Any) -> None:
    # Transformers reads the source file of the class to know.
    name, can_set = _own_class(model).__name__, getattr(_own_class(model), "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        raise SequenceParallelError(
            f"{name} does not reach its attention through Hugging Face's interface, so setting one is a silent no-op: it cannot be rewritten; "
            "use a model whose modeling file calls ALL_ATTENTION_FUNCTIONS (Llama, Qwen, Mistral, Gemma, GPT-2, ...)"
        )


def _shape(value: Any) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"({type(value).__name__})"
