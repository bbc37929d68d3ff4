"""FSDP2 over every rank: sequence parallelism always brings ZeRO with it.

Blocks are one group each, then the LightningModule's children, then the root, so that no parameter stays outside (it would never be
synchronised, and ranks would drift silently). Gradients are averaged over the whole mesh; `loss` undoes exactly that factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def check_unsharded(root: nn.Module) -> None:
    """Refuse a model that was sharded by hand: its mesh would not be the strategy's."""
    found = [name or "the root" for name, each in root.named_modules() if isinstance(each, FSDPModule)]
    if found:
        raise SequenceParallelError(
            f"{len(found)} modules are already fully_shard'ed ({found[0]}, ...): the strategy shards over its own mesh; "
            "remove fully_shard from configure_model"
        )


def shard_model(root: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Apply FSDP2 to the blocks, to the root's children and to the root, in place."""
    for block in blocks:
        fully_shard(block, mesh=mesh)
    for child in root.children():
        if not isinstance(child, (FSDPModule, nn.ModuleList, nn.ModuleDict)) and any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(root, mesh=mesh)
    for name in STEPS:
        # Lightning calls these and not forward, which alone would gather the root's parameters.
        if callable(getattr(root, name, None)):
            register_fsdp_forward_method(root, name)


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    """Return the sharded modules, the root first."""
    return [each for each in root.modules() if isinstance(each, FSDPModule)]


def reshard(root: nn.Module) -> None:
    """Free gathered parameters: after an evaluation forward the root keeps its own gathered."""
    for each in fsdp_modules(root):
        each.reshard()


@contextmanager
def without_gradient_sync(root: nn.Module) -> Iterator[None]:
    """Accumulate whole local gradients without communication; the last micro-batch of a window reduces them."""
    modules = fsdp_modules(root)
    for each in modules:
        each.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for each in modules:
            each.set_requires_gradient_sync(True, recurse=False)


def start_root(root: nn.Module) -> None:
    """Make `root` the FSDP root now, before a hook of the user's runs a child alone and makes that the root."""
    comm.make_fsdp_root(root)
