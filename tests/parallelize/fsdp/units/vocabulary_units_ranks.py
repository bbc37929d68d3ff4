"""What the ranks of test_vocabulary_units run."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils.checkpoint import checkpoint

from lightning_sp.parallelize import make_fsdp_root, run_with_whole_parameters, shard_model, transformer_blocks
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups
from lightning_sp.parallelize.fsdp.units.vocabulary_units import vocabulary_layers
from lightning_sp.testing import max_error
from tests.instruments.live_storages import LiveStorages
from tests.parallelize.fsdp.gloo_collectives_ranks import mesh_of

VOCAB, DIM = 97, 8


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Decoder(nn.Module):
    """An embedding, blocks and a head; what is not linear stands between."""

    def __init__(self, vocab: int = VOCAB, dim: int = DIM, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(ids)).flatten(0, 1), ids.flatten())


class Chunked(Decoder):
    """The head for a few tokens after the other, as many parts as the rank has rows."""

    def part(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden), ids, reduction="sum")

    def forward(self, ids: Tensor) -> Tensor:
        parts = zip(self.hidden(ids).flatten(0, 1).split(4), ids.flatten().split(4), strict=True)
        return torch.stack([self.part(*each) for each in parts]).sum() / ids.numel()


class Recomputed(Chunked):
    """These parts recomputed in the backward."""

    def part(self, hidden: Tensor, ids: Tensor) -> Tensor:
        found: Tensor = checkpoint(super().part, hidden, ids, use_reentrant=False)
        return found


class Twice(Decoder):
    """Two forwards before a backward, the first without gradients; the output of the embedding is changed in place."""

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.head(self.hidden(ids)).argmax(-1)
        x = self.embedding(ids)
        x[:, 0] = 1.0
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten()) + super().forward(ids.flip(1))


class Masked(Decoder):
    """A projection before the blocks, with a bias, whose output is changed in place: hidden of padding, as wav2vec 2.0's."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        later = [(name, self._modules.pop(name)) for name in ("blocks", "norm", "head")]
        self.projection, self.narrow = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self._modules.update(later)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.projection(self.embedding(ids).tanh())
        x[ids % 3 == 0] = 0.0
        x = self.narrow(x)
        x.mul_(2.0)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Direct(Decoder):
    """Uses the head's weight without a call."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(self.hidden(ids), self.head.weight).flatten(0, 1), ids.flatten())


class Tied(Decoder):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.head.weight = self.embedding.weight


class Handed(Decoder):
    """Gives the head to a function."""

    def forward(self, ids: Tensor) -> Tensor:
        return by_hand(self.hidden(ids), self.head, ids)


def by_hand(hidden: Tensor, head: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ head.weight.T).flatten(0, 1), ids.flatten())


class Stepped(nn.Module):
    """What a LightningModule is to FSDP: a module whose step is called."""

    def __init__(self, model: nn.Module, step: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.model, self.step = model, step or (lambda model, ids: model(ids))

    def training_step(self, ids: Tensor) -> Tensor:
        return self.step(self.model, ids)


def parts_by_step(model: Any, ids: Tensor) -> Tensor:
    """A step that calls the parts by themselves, the head for one row after the other."""
    hidden = model.norm(model.hidden(ids))
    return torch.stack([F.cross_entropy(model.head(h), row) for h, row in zip(hidden, ids, strict=True)]).mean()


def weight_by_step(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy((model.hidden(ids) @ model.head.weight.T).flatten(0, 1), ids.flatten())


def weight_after_its_call(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids) + model.head.weight.pow(2).mean()
    return loss


MODELS: dict[str, Any] = {
    "separate": Decoder, "masked": Masked, "chunked": Chunked, "recomputed": Recomputed, "twice": Twice, "direct": Direct,
    "tied": Tied, "handed": Handed,
}  # fmt: skip
STEPS = {"parts": parts_by_step, "weight after": weight_after_its_call}


def tokens(rank: int, step: int, rows: int = 2, length: int = 8) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(10 * step + rank))


def build(kind: str, sharded: bool, shape: tuple[int, ...] = (2,)) -> Stepped:
    torch.manual_seed(0)
    root = Stepped(MODELS.get(kind, Decoder)().double(), STEPS.get(kind))
    if sharded:
        shard_model(root, transformer_blocks(root), mesh_of(shape))
        make_fsdp_root(root)
    return root


def trained(root: Stepped, ranks: list[int], steps: int = 3) -> list[dict[str, Tensor]]:
    """Return each step's gradients, of the mean of the ranks' losses; an SGD step between."""
    optimizer = torch.optim.SGD(root.parameters(), lr=0.5)
    found = []
    for step in range(steps):
        torch.stack([root.training_step(tokens(rank, step)) for rank in ranks]).mean().backward()
        whole = {n: p.grad for n, p in root.named_parameters()}
        found.append({n: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for n, g in whole.items()})
        optimizer.step()
        optimizer.zero_grad()
    return found


def law(kind: str, shape: tuple[int, ...]) -> tuple[float, list[str], Counter[str]]:
    """Return the largest error of a gradient in three steps, the units beside blocks and models, and a step's collectives."""
    world, rank = dist.get_world_size(), dist.get_rank()
    reference = trained(build(kind, sharded=False), list(range(world)))
    root = build(kind, sharded=True, shape=shape)
    calls: Counter[str] = Counter()
    with counted_units(root, calls):
        gradients = trained(root, [rank])
    worst = max(max_error(g[name], e[name]) for g, e in zip(gradients, reference, strict=True) for name in e)
    units = [n for n, each in root.model.named_modules() if isinstance(each, FSDPModule) and "blocks" not in n and n]
    return worst, units, Counter({name: number // 3 for name, number in calls.items()})


def counted_units(root: nn.Module, calls: Counter[str]) -> Any:
    """Count each unit's gathers and reductions, by its name in the model."""
    names = {each: name.removeprefix("model").strip(".") or "model" for name, each in root.named_modules()}
    owners = {id(p): g for g in parameter_groups(fsdp_modules(root)) for p in g.fsdp_params}

    def counted(name: str) -> Any:
        function = getattr(_fsdp_param_group, f"foreach_{name}")

        def run(parameters: Any, *args: Any) -> Any:
            calls[f"{name} {names[owners[id(parameters[0])].modules[0]]}"] += 1
            return function(parameters, *args)

        return run

    return mock.patch.multiple(
        _fsdp_param_group, **{f"foreach_{name}": counted(name) for name in ("all_gather", "reduce")}
    )


def without_a_call(shape: tuple[int, ...]) -> float:
    """Return the largest error of a gradient where a step reads the head's weight without a call, each rank for tokens of its own."""
    world, rank = dist.get_world_size(), dist.get_rank()
    reference, root = build("", sharded=False), build("", sharded=True, shape=shape)
    reference.step = root.step = weight_by_step
    step = root.training_step
    root.training_step = lambda ids: run_with_whole_parameters(lambda: step(ids))  # type: ignore[method-assign]
    found, wanted = trained(root, [rank]), trained(reference, list(range(world)))
    return max(max_error(g[name], e[name]) for g, e in zip(found, wanted, strict=True) for name in e)


def peak_bytes(vocab: int, dim: int, separate: bool) -> int:
    """Return the bytes of tensors that a step of forward and backward has at once beside shards; as one unit with the model's rest, or not."""
    root = Stepped(Decoder(vocab, dim, layers=2))
    found = vocabulary_layers if separate else lambda *_: []
    with mock.patch.object(sys.modules[shard_model.__module__], "vocabulary_layers", found):
        shard_model(root, transformer_blocks(root), mesh_of((dist.get_world_size(),)))
    make_fsdp_root(root)
    with LiveStorages([each.to_local() for each in root.parameters()]) as live:
        root.training_step(tokens(0, 0)).backward()
    return live.peak_bytes
