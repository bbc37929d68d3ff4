"""What the ranks of test_gather_dtypes run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.instruments.traffic import counted
from lightning_sp.config import MemoryOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize import accumulating, make_fsdp_root, reshard, shard_model, transformer_blocks
from lightning_sp.parallelize.fsdp.parameter_groups import fsdp_modules, parameter_groups
from lightning_sp.parallelize.fsdp.unused_parameters import used_parameters
from lightning_sp.parameter_names import user_name
from tests.parallelize.fsdp.gloo_collectives_ranks import mesh_of
from tests.parallelize.fsdp.units.vocabulary_units_ranks import MODELS, Decoder, Stepped, tokens

AUTOCAST = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


class Part(nn.Module):
    """A layer of a block, with a weight that something reads."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made


class Router(Part):
    """In float32 by hand, as Switch's is."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x * super().forward(x.float()).softmax(-1)


class ReadWithoutCall(Part):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.layer.weight.norm())


class FloatByHand(Part):
    """The weight is cast to what it is, and the product left to autocast: nothing reads it in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.layer.weight.dtype), self.layer.weight.float(), self.layer.bias)


class Rows(Part):
    """Parts of the weight, as a projection of q, k and v is used."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layer.weight.chunk(2)
        return torch.cat([F.linear(x, first), F.linear(x, second)], -1)


class Convolution(Part):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.layer = nn.Conv1d(dim, dim, 3, padding=1)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x.transpose(1, 2)).transpose(1, 2)
        return made


class LowRank(Part):
    """LoRA: a frozen layer and two small ones, whose input has their dtype."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.layer.requires_grad_(False)
        self.a, self.b = nn.Linear(dim, 2, bias=False), nn.Linear(2, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.b(self.a(x.to(self.a.weight.dtype)))


class Twice(Part):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(super().forward(x)))


class Recomputed(Twice):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return made


PARTS: dict[str, Any] = {
    "linear": Part, "router": Router, "read without a call": ReadWithoutCall, "float by hand": FloatByHand, "rows": Rows,
    "convolution": Convolution, "low rank": LowRank, "twice": Twice, "recomputed": Recomputed,
}  # fmt: skip


class Block(nn.Module):
    """Parts in a row, between norms."""

    def __init__(self, kinds: Any, dim: int = 8) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: kinds[name](dim) for name in kinds})
        self.norm = nn.LayerNorm(dim)
        self.late = False  # reads a weight

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = x + part(self.norm(x))
        if self.late:
            x = x * self.parts["linear"].layer.weight.mean()  # type: ignore[union-attr, operator]
        return x


class Model(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(PARTS) for _ in range(2))


def partly(model: nn.Module, ids: Tensor) -> Tensor:
    """A step whose second forward is outside of autocast."""
    first: Tensor = model(ids)
    with torch.autocast("cpu", enabled=False):
        return first + model(ids.flip(0))


def first_in_float32(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        first: Tensor = model(ids.flip(0))
    return first + model(ids)


def looked_at(model: nn.Module, ids: Tensor) -> Tensor:
    """A step that begins with a forward without gradients in float32, after which weights may be whole."""
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        first: Tensor = model(ids.flip(0))
    return first + model(ids)


STEPS = {"looked at": looked_at, "looked at again": looked_at, "partly": partly, "first in float32": first_in_float32}


def build(kind: str, shape: tuple[int, ...], gather_dtype: str, **options: Any) -> Stepped:
    """Return a model of float32, sharded."""
    torch.manual_seed(0)
    root = Stepped({"parts": Model, **MODELS}.get(kind, Decoder)(), STEPS.get(kind))
    shard_model(root, transformer_blocks(root), mesh_of(shape), MemoryOptions(gather_dtype=gather_dtype, **options))
    make_fsdp_root(root)
    return root


def rounded(root: nn.Module) -> set[str]:
    """Return the names of the weights that were gathered in bfloat16 when they were last."""
    parameters = [each for group in parameter_groups(fsdp_modules(root)) for each in group.fsdp_params]
    return {user_name(p._param_fqn) for p in parameters if p.all_gather_outputs[0].dtype == torch.bfloat16}


@contextmanager
def synced(root: nn.Module, sync: bool) -> Iterator[None]:
    with nullcontext() if sync else accumulating(root, whole=True):
        yield


def trained(
    root: Stepped, steps: int, micro_batches: int = 1, later: Any = None
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return each step's losses and whole gradients; an evaluation and a forward outside of autocast between.

    Args:
        root: the model.
        steps: how many.
        micro_batches: of a step.
        later: what the last two steps do.
    """
    optimizer = torch.optim.SGD([p for p in root.parameters() if p.requires_grad], lr=0.5)
    found = []
    for step in range(steps):
        root.step = later if later is not None and step >= steps - 2 else root.step
        losses = []
        for micro in range(micro_batches):
            batch = tokens(dist.get_rank(), 100 * step + micro)
            with AUTOCAST():
                loss = root.training_step(batch)
            losses.append(loss.detach())
            with synced(root, micro == micro_batches - 1):
                loss.backward()
            for context in (AUTOCAST(), nullcontext()):
                with context, torch.no_grad():
                    losses.append(root.training_step(batch))
            reshard(root)
        gradients = {n: p.grad.full_tensor() for n, p in root.named_parameters() if p.grad is not None}
        found.append((torch.stack(losses), {n: g.clone() for n, g in gradients.items()}))
        optimizer.step()
        optimizer.zero_grad()
    return found


def law(
    kind: str, shape: tuple[int, ...], micro_batches: int, options: dict[str, Any]
) -> tuple[list[str], set[str], set[str]]:
    """Return what differs in a bit from a run that gathers float32, and the weights that travelled in bfloat16 here and there."""
    kind, _, later = kind.partition(", later ")
    roots = [build(kind, shape, each, **options) for each in ("float32", "auto")]
    expected, actual = (trained(root, 4, micro_batches, STEPS.get(later)) for root in roots)
    differ = []
    for step, ((loss, gradients), (other, others)) in enumerate(zip(expected, actual, strict=True)):
        assert gradients.keys() == others.keys()
        pairs = {"loss": (loss, other)} | {n: (g, others[n]) for n, g in gradients.items()}
        differ += [f"{name} in step {step}" for name, (a, b) in pairs.items() if not torch.equal(a, b)]
    with AUTOCAST():
        for root in roots:
            root.training_step(tokens(0, 0)).backward()
    return differ, rounded(roots[1]), rounded(roots[0])


def sent(shape: tuple[int, ...]) -> list[int]:
    """Return the bytes of messages that leave this rank in a forward, with gathers in float32 and as by default, and what is saved."""
    found = []
    for gather_dtype in ("float32", "auto"):
        root = build("parts", shape, gather_dtype)
        trained(root, 3)
        with counted() as traffic, AUTOCAST(), torch.no_grad():
            root.training_step(tokens(dist.get_rank(), 0))
        found.append(traffic.sent_bytes)
    names, shards = rounded(root), shape[-1]
    sizes = [-(-len(p) // shards) * p[0].numel() for n, p in root.named_parameters() if user_name(n) in names]
    return [*found, (shards - 1) * 2 * sum(sizes)]


def late() -> tuple[str, int]:
    """Return what a step says that reads a weight which no step before has read, and how many weights were decided by then."""
    root = build("parts", (dist.get_world_size(),), "auto")
    trained(root, 3)
    used = used_parameters(root)
    assert used is not None
    assert used.gather_dtypes is not None
    root.model.blocks[0].late = True
    try:
        with AUTOCAST():
            root.training_step(tokens(0, 0))
    except SequenceParallelError as error:
        return str(error), used.gather_dtypes.num_rounded
    return "NOT REFUSED", used.gather_dtypes.num_rounded
