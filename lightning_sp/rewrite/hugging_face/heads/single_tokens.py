"""Heads of Hugging Face models that read single tokens of a sequence: they are given those of the whole sequence.

    score          GenericForSequenceClassification, GPT-2: the last token that is no padding
    pooler, ...ClassificationHead                           the first token
    qa_outputs     ...ForQuestionAnswering                  where an answer begins and ends, over all tokens
    pooler         ALBERT's, a layer that is given the first token

The models' own code then goes on as on one device: its loss, and the logits that it returns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_sp.context.step import SequenceContext
from lightning_sp.reductions import at_positions, last_token, unshard
from lightning_sp.rewrite.hugging_face.models import own_class


def give_single_tokens(model: Any, context: SequenceContext) -> list[RemovableHandle]:
    """Hook the heads of a model that are known by their structure; return the hooks."""
    name = own_class(model).__name__
    hooks = []
    if "ForQuestionAnswering" in name and isinstance(getattr(model, "qa_outputs", None), nn.Module):
        hooks.append(model.qa_outputs.register_forward_hook(partial(_whole_output, context)))
    if "ForSequenceClassification" in name and isinstance(getattr(model, "score", None), nn.Module):
        inputs: dict[str, Any] = {}
        hooks.append(model.register_forward_pre_hook(partial(_remember_inputs, inputs), with_kwargs=True))
        hooks.append(model.score.register_forward_hook(partial(_last_output, context, model, inputs)))
        # A step may call `score` by itself, for a value of each token.
        hooks.append(model.register_forward_hook(lambda *_: inputs.clear(), always_call=True))
    for module in model.modules():
        if takes_first_token(module):
            hooks.append(module.register_forward_pre_hook(partial(_first_input, context)))
        if picks_before_pooler(module):
            states: list[Any] = []
            hooks.append(module.encoder.register_forward_hook(partial(_remember_states, states)))
            hooks.append(module.pooler.register_forward_pre_hook(partial(_first_state, context, states)))
    return hooks


def takes_first_token(module: nn.Module) -> bool:
    """Return whether a module is given a sequence and takes its first token, by its class's name."""
    return own_class(module).__name__.endswith(("Pooler", "ClassificationHead"))


def picks_before_pooler(module: nn.Module) -> bool:
    """Return whether a module is ALBERT's, which gives its pooler, a layer, the first of the encoder's states."""
    encoder = getattr(module, "encoder", None)
    return isinstance(getattr(module, "pooler", None), nn.Linear) and isinstance(encoder, nn.Module)


def _remember_states(states: list[Any], _: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    states[:] = [output if isinstance(output, Tensor) else output[0]]


def _first_state(
    context: SequenceContext, states: list[Any], _: nn.Module, inputs: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    if not states or not inputs or not _is_shard(whole := states.pop(), context, 3):
        return None
    # A view of the first of them: another model's pooler may be given something else.
    picked = isinstance(inputs[0], Tensor) and inputs[0].dim() == 2 and inputs[0].data_ptr() == whole.data_ptr()
    return (at_positions(whole, 0), *inputs[1:]) if picked else None


def _is_shard(tensor: Any, context: SequenceContext, dims: int) -> bool:
    """Return whether a tensor has this rank's tokens as dim 1."""
    if context.step is None or context.mesh.layout.size == 1:
        return False
    return isinstance(tensor, Tensor) and tensor.dim() == dims and tensor.shape[1] == context.local_length


def _whole_output(context: SequenceContext, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return unshard(output) if _is_shard(output, context, 3) else output


def _first_input(context: SequenceContext, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if not inputs or not _is_shard(inputs[0], context, 3):
        return None
    return at_positions(inputs[0], 0).unsqueeze(1), *inputs[1:]


def _remember_inputs(remembered: dict[str, Any], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    remembered.clear()
    remembered["input_ids"] = kwargs.get("input_ids", args[0] if args else None)


def _last_output(
    context: SequenceContext,
    model: Any,
    remembered: dict[str, Any],
    _: nn.Module,
    inputs: tuple[Any, ...],
    output: Tensor,
) -> Tensor:
    """Return what the last token has for every token of the shard: the model picks one of them by an index in the shard."""
    if not remembered or not _is_shard(output, context, 3):
        return output
    padding, ids = model.config.get_text_config().pad_token_id, remembered.get("input_ids")
    mask = None if padding is None or not isinstance(ids, Tensor) else ids != padding
    last = last_token(output, mask)
    if mask is not None:
        # The model takes the first token of a row that is all padding.
        first, empty = at_positions(output, 0), ~unshard(mask).any(1)
        last = first.where(empty.unsqueeze(-1), last)
    return last.unsqueeze(1).expand_as(output)
