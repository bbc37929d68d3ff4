"""What a tensor says of itself: shape, dtype and device as one device would see them, its gradient's history from this rank's part.

Numbers that leave torch (`tolist`, `numpy`, `item`) are whole.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.calls.call import NO_RULE, Call, Rule, is_sequence, named
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor
from lightning_sp.users_line import users_line

SHOWN = """
    shape size dim ndim ndimension numel nelement dtype device layout is_cuda is_cpu is_floating_point is_complex is_signed is_sparse is_meta
    is_quantized is_mps is_xpu is_nested is_mkldnn is_contiguous stride element_size itemsize nbytes get_device is_inference hash len
    is_tensor is_same_size storage_offset _has_symbolic_sizes_strides is_neg is_conj
"""
OF_AUTOGRAD = """
    requires_grad grad_fn is_leaf _base untyped_storage _version retains_grad output_nr retain_grad
"""
# What a compiler asks of a tensor before it asks its part.
OF_COMPILER = "grad _grad is_view"
OF_VALUES = "tolist numpy item __array__"


def is_compiling() -> bool:
    """Return whether a compiler asks. torch 2.11 says so within what it traces alone, and not while it looks at a graph's inputs."""
    return torch.compiler.is_compiling() or torch._guards.CompileContext.current_compile_id() is not None


def shown(call: Call) -> Any:
    """Answer with what is shown."""
    with torch._C.DisableTorchFunctionSubclass():
        return call.function(*call.args, **call.kwargs)


def to_compiler(call: Call) -> Any:
    """Answer a compiler with what is shown: it has no history and no memory."""
    return shown(call) if is_compiling() else NO_RULE


def of_autograd(call: Call) -> Any:
    """Answer with what this rank's part has; scores of an attention, which nothing reads, have no history."""
    x = call.args[0]
    if is_compiling() and call.name != "_version" and call.function.__name__ != "requires_grad_":
        return to_compiler(call)
    if call.function.__name__ == "requires_grad_":
        return NO_RULE  # it gives the tensor itself
    if is_sequence(x):
        return call.on_locals()
    return _OF_SCORES.get(call.name, NO_RULE)


_OF_SCORES = {
    "requires_grad": False,
    "grad_fn": None,
    "is_leaf": True,
    "_base": None,
    "retains_grad": False,
    "_version": 0,
}


def hook(call: Call) -> Any:
    """Refuse a user's, which would see the gradient of this rank's part, times the number of ranks; FSDP2 has some of its own."""
    given = call.argument(1, "hook")
    if (getattr(given, "__module__", None) or "").startswith(("torch.", "lightning_sp.")):
        return call.on_locals()
    raise SequenceParallelError(
        f"global_view: {call.function.__name__} of a tensor of the sequence ({users_line()}) would see the gradient of this rank's part; use "
        "a hook of a parameter, or write what the hook does into the forward"
    )


def address(call: Call) -> Any:
    """Refuse to say where numbers lie: a kernel that reads there finds this rank's part, or nothing."""
    raise SequenceParallelError(
        f"global_view: {call.name} of a tensor of the sequence ({users_line()}): a kernel of your own would find this rank's part there; "
        "write it with functions of torch, or hand it lightning_sp.reductions.unshard(x), the whole on every rank"
    )


def of_values(call: Call) -> Any:
    """Answer with the whole."""
    return call.on_wholes()


def number(call: Call) -> Any:
    """Answer with a single number."""
    return call.on_wholes() if call.args[0].numel() == 1 else NO_RULE


def text(call: Call) -> str:
    """Describe it, without a collective."""
    x = call.args[0]
    if not is_sequence(x):
        return f"Scores(shape={tuple(x.shape)}, dtype={x.dtype})"
    own = x.placement
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(x.shape)
    return f"SequenceTensor(shape={shape}, dim {own.dim} over {own.storage.layout.size} ranks, this rank's part {x._local!r})"


def copied(call: Call) -> Any:
    """Copy it deeply."""
    x: SequenceTensor = call.args[0]
    return SequenceTensor(deepcopy(x.local), x.placement)


def data(call: Call) -> Any:
    """Return the numbers without a history."""
    x: SequenceTensor = call.args[0]
    return SequenceTensor(x.local.detach(), x.placement) if len(call.args) == 1 else NO_RULE


RULES: dict[str, Rule] = {
    **named(SHOWN, shown),
    **named(OF_AUTOGRAD, of_autograd),
    **named(OF_COMPILER, to_compiler),
    **named("register_hook register_post_accumulate_grad_hook", hook),
    **named("data_ptr", address),
    **named(OF_VALUES, of_values),
    **named("__bool__ __int__ __float__ __index__", number),
    **named("__repr__ __str__ __format__", text),
    **named("deepcopy", copied),
    **named("data", data),
}
