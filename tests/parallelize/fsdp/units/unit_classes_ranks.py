"""What the ranks of test_unit_classes run: sharded modules asked for their class, and an optimizer whose groups go by it."""

from __future__ import annotations

import warnings
from abc import ABC
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader

from lightning_sp.errors import SequenceParallelError
from lightning_sp.models import llama
from lightning_sp.parallelize.fsdp.shard_model import shard_model
from tests.trainer.tiny import Plain, TokenDataset, _full, plain_trainer, quiet_trainer, tiny_llama


class Block(nn.Linear):
    pass


class Derived(Block):
    pass


class Abstract(nn.Linear, ABC):
    """One with a metaclass of its own."""


def ask() -> list[Any]:
    """Return what is asked of the class of sharded modules, as on one device all of it is true."""
    model = nn.Sequential(*(kind(4, 4) for kind in (Block, Derived, Abstract, nn.Linear)))
    shard_model(model, list(model), init_device_mesh("cpu", (2,)))
    block, derived, abstract, linear = map(type, model)
    weight_norm(model[0])
    return [
        (block.__name__, repr(model[1]).partition("(")[0]) == ("Block", "Derived"),
        block == Block,
        Block == block,
        block in (nn.Embedding, Block),
        {Block: 1, nn.Linear: 2}[linear] == 2,
        abstract == Abstract,
        derived not in (Block, nn.Linear),
        isinstance(model[1], Block),
        type(model[0]) not in (Block,),  # it is parametrized now
    ]


class ByIdentity(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Block(4, 4), nn.Linear(4, 4), nn.ReLU())
        for each in self:
            if type(each) is Block:
                nn.init.zeros_(each.weight)

    def penalised(self) -> list[nn.Module]:
        found: list[nn.Module] = [each for each in self if type(each) is Block]
        found += [each for each in self if nn.Linear is each.__class__]
        return found + [each for each in self if type(each) is nn.ReLU]


def told() -> str:
    """Return what is told where a module is sharded that asks for classes by identity."""
    model = ByIdentity()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        shard_model(model, list(model), init_device_mesh("cpu", (2,)))
    return " ".join(str(each.message) for each in found)


class Grouped(Plain):
    def configure_optimizers(self) -> Any:
        blocks = [p for each in self.modules() if type(each) in (llama.Block,) for p in each.parameters()]
        others = [p for p in self.parameters() if not any(p is each for each in blocks)]
        return torch.optim.SGD([dict(params=blocks, lr=0.01), dict(params=others, lr=0.1)])


def fit(world: int) -> list[torch.Tensor]:
    """Return the weights behind a few steps."""
    torch.manual_seed(3)
    module = Grouped(partial(tiny_llama, num_layers=2))
    trainer = quiet_trainer(world) if world > 1 else plain_trainer(max_epochs=1)
    trainer.fit(module, DataLoader(TokenDataset(4), batch_size=2))
    return [_full(each.detach()).clone() for each in module.parameters()]


class Unsharding(nn.Linear):
    def unshard(self) -> float:
        return 1.0


def hidden() -> str:
    """Return what refuses a module with a method of FSDP2's name."""
    try:
        shard_model(Unsharding(4, 4), [], init_device_mesh("cpu", (2,)))
    except SequenceParallelError as refusal:
        return str(refusal)
    return ""
