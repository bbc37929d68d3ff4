"""What a model holds that cannot be sharded, or would not be one device's on shards: refused before anything of it is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor, placement_types
from torch.optim import Optimizer

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parameter_names import user_name
from lightning_sp.weights.quantized import is_quantized


def check_parameters(root: nn.Module) -> None:
    """Refuse parameters that are no plain tensors and no quantized weights of a known form (those of lazy modules, say), have no element, or are
    trained and complex, hooks that would be lost, or a forward that writes to them. Equal on all ranks.

    Raises:
        SequenceParallelError: with the first of them.
    """
    strange = {
        n: p
        for n, p in root.named_parameters()
        if (type(p) is not nn.Parameter or type(p.data) is not torch.Tensor) and not is_quantized(p)
    }
    for name, parameter in strange.items():
        kind = type(parameter.data) if type(parameter) is nn.Parameter else type(parameter)
        others = f", with {len(strange) - 1} more like it" if len(strange) > 1 else ""
        plain = type(parameter.data) is torch.Tensor or issubclass(kind, nn.Parameter)
        raise SequenceParallelError(
            f"{user_name(name)} is a {kind.__module__}.{kind.__qualname__}{others}: what a shard of it is, and "
            "how rank 0's values reach the others, is known for plain tensors alone; "
            + (
                "make it a plain nn.Parameter, and note by an attribute of it what it is (weight.kind = ...): its shard keeps that"
                if plain and not isinstance(parameter, nn.UninitializedParameter)
                else "quantized weights are carried if they are frozen and of bitsandbytes (4-bit) or torchao (requires_grad=False, with LoRA); "
                "run lazy modules once before the Trainer gets them"
            )
        )
    for name, parameter in root.named_parameters():
        if parameter.numel() == 0:
            raise SequenceParallelError(
                f"{user_name(name)} of shape {tuple(parameter.shape)} has no element: FSDP2 cannot reduce the gradient of nothing; leave it "
                "out of the model, or choose sizes that leave it some"
            )
        if parameter.is_complex() and parameter.requires_grad:
            raise SequenceParallelError(
                f"{user_name(name)} is trained and {parameter.dtype}: optimizers step its real and its imaginary numbers by themselves, which "
                "sharded tensors do not carry; keep two real numbers, nn.Parameter(torch.view_as_real(w)), and read "
                "torch.view_as_complex(self.w)"
            )
    _check_scripted(root)
    _check_embeddings(root)
    check_hooks(root, "_backward_hooks", "_post_accumulate_grad_hooks")


def _check_scripted(root: nn.Module) -> None:
    for name, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise SequenceParallelError(
                f"{user_name(name)} is compiled by torch.jit.script or torch.jit.trace ({module.original_name}): FSDP2 changes which tensors a "
                "module holds, and code of TorchScript has its own; leave torch.jit out, or pass compile=True for compiled blocks"
            )


def _check_embeddings(root: nn.Module) -> None:
    for name, module in root.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.sparse:
            raise SequenceParallelError(
                f"{user_name(name)} has sparse=True: FSDP2 splits and adds up dense gradients alone; leave sparse out, and SparseAdam with it"
            )
        if module.max_norm is not None:
            raise SequenceParallelError(
                f"{user_name(name)} has max_norm={module.max_norm}: its forward scales the rows of its tokens down, each rank those of its own "
                "tokens, in a copy that FSDP2 frees; scale the weight in on_train_batch_start, or leave max_norm out"
            )


@contextmanager
def undistributed() -> Iterator[None]:
    """Refuse `distribute_tensor` while a model is built: rank 0 alone holds values then, and would wait for the others. Equal on all ranks."""
    with ExitStack() as undo:
        for module, name in ((placement_types, "mesh_broadcast"), (placement_types, "mesh_scatter")):
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, _refuse_distribution)
        yield


def _refuse_distribution(*args: object, **kwargs: object) -> NoReturn:
    raise SequenceParallelError(
        "distribute_tensor while the model is built: the strategy shards every parameter over its own mesh, after configure_model; leave "
        "plain tensors, and choose over how many ranks by shard_size"
    )


def check_hooks(root: nn.Module, *kinds: str) -> None:
    """Refuse hooks of parameters that FSDP2 would not call. Equal on all ranks.

    Args:
        root: the model.
        kinds: torch's attributes of them. Before the model is sharded all are lost with the parameters; afterwards FSDP2 calls
            `_post_accumulate_grad_hooks` itself.

    Raises:
        SequenceParallelError: with the first parameter that has some.
    """
    for name, parameter in root.named_parameters():
        if num_hooks := sum(len(getattr(parameter, kind, None) or {}) for kind in kinds):
            raise SequenceParallelError(
                f"{user_name(name)} has {num_hooks} hook(s) that FSDP2 would never call; register_post_accumulate_grad_hook works from "
                "on_fit_start on, register_hook does not: change gradients there, in on_before_optimizer_step, or in a hook of the module"
            )


def with_backward_hooks(root: nn.Module) -> list[str]:
    """Return the names of modules with backward hooks of the user's: torch hands them gradients of what the module has computed."""
    libraries = ("torch", "lightning", "lightning_sp")
    return [
        user_name(name) or type(module).__name__
        for name, module in root.named_modules()
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values())
        if str(getattr(hook, "__module__", "")).partition(".")[0] not in libraries
    ]


def check_optimized(root: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Refuse what an optimizer steps beside the shards of the model: its gradient is a rank's own. Equal on all ranks.

    Args:
        root: the sharded model.
        optimizers: of a training that is about to make a step.

    Raises:
        SequenceParallelError: with the first such tensor.
    """
    stepped = (tensor for each in optimizers for group in each.param_groups for tensor in group["params"])
    for tensor in stepped:
        if isinstance(tensor, DTensor):
            continue
        names = [user_name(name) for name, parameter in root.named_parameters() if parameter is tensor]
        what = names[0] if names else "a tensor that is no parameter of the LightningModule"
        raise SequenceParallelError(
            f"an optimizer steps {what}, of shape {tuple(tensor.shape)}, which was not there when the model was sharded: no rank would add its "
            "gradient to the others'; make it a parameter of a module in __init__ or configure_model, and freeze it until it is to learn. An "
            "optimizer that has stepped whole weights before the run has them still: make it in configure_optimizers"
        )
