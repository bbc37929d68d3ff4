"""What runs in the ranks: a case on shards in the global view, and on one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from torch.utils._pytree import tree_leaves

from lightning_sp import comm
from lightning_sp.config import AttentionOptions
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.errors import SequenceParallelError
from lightning_sp.global_view.batch import global_batch
from lightning_sp.global_view.exchange.movement import in_order
from lightning_sp.global_view.paths_of_torch import paths_as_on_one_device
from lightning_sp.global_view.tensors.sequence_tensor import SequenceTensor, whole_of
from lightning_sp.global_view.user_functions.autograd_functions import watched_functions
from lightning_sp.global_view.user_functions.collectives import collectives_refused
from lightning_sp.global_view.user_functions.scripted_functions import scripted_functions_in_python
from lightning_sp.layout import pad, shard
from lightning_sp.mesh import SequenceMesh, build_device_mesh
from lightning_sp.rewrite.whole_attention import WholeAttention
from tests.global_view.cases.function_cases import of_users
from tests.global_view.cases.rule_cases import CASES
from tests.global_view.whole import E, V, Whole


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, length, E, generator=generator, dtype=torch.float64)
    ids = torch.randint(V, (2, length), generator=generator)
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, length - 3 :] = 0
    return x, ids, mask


def run(name: str, tensors: tuple[Any, ...], whole: Whole) -> Any:
    return CASES[name](*tensors, whole)


def parameters(whole: Whole) -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in vars(whole).values()]


def backward(result: Any, scale: float) -> None:
    total = torch.zeros((), dtype=torch.float64)
    for i, each in enumerate(tree_leaves(result)):
        if each.is_floating_point() or each.is_complex():
            weights = torch.randn(each.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
            total = total + (each * weights).sum()
    if total.requires_grad:
        (total * scale).backward()


def expected(name: str, length: int) -> tuple[Any, list[Any]]:
    x, ids, mask = inputs(length)
    whole = Whole(length)
    leaves = [x.requires_grad_(), *parameters(whole)]
    result = run(name, (x, ids, mask), whole)
    backward(result, 1.0)
    return [each.detach() for each in tree_leaves(result)], [each.grad for each in leaves]


def in_global_view(names: list[str], length: int, ulysses: int, ring: int) -> list[Any]:
    """Return for each case the largest errors of result and gradients, or what was refused."""
    warnings.filterwarnings("ignore", "torch flash")
    torch.use_deterministic_algorithms(False)  # a Trainer of another test asks for them, and max_unpool has none
    base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=ulysses * ring)
    mesh = SequenceMesh.build(base, ring_size=ring, ulysses_size=ulysses)
    return [errors(name, length, mesh) for name in names]


def batch_of(length: int, mesh: SequenceMesh, is_packed: bool = False) -> tuple[Any, Tensor]:
    """Return the inputs in the global view, of one document each or of two that are declared, and the leaf of this rank's part."""
    padded = mesh.layout.padded_length(length)
    parts = [
        shard(torch.cat([each, each[:, -1:].expand(-1, padded - length, *each.shape[2:])], 1), mesh.layout, mesh.sequence_rank, dim=1)
        for each in inputs(length)
    ]  # fmt: skip
    leaf = parts[0].requires_grad_()
    info = SequenceInfo(
        rows=2, length=length, padded_length=padded, boundaries=torch.tensor([[0, 5, padded]]) if is_packed else None, position_ids=None,
        shift_labels=None, layout=mesh.layout, dims={"0": 1, "1": 1, "2": 1}, names=("0", "1", "2"),
        positions_given=is_packed, documents_declared=is_packed,
    )  # fmt: skip
    context = SequenceContext(mesh, AttentionOptions())
    context.global_view = True
    context.begin(Step(batch=info))
    batch = global_batch(
        tuple(parts), info, rank=mesh.sequence_rank, group=mesh.sequence_group, attend=WholeAttention(context),
        note_reduction=lambda: None, agree=comm.agree, own_draws=nullcontext,
    )  # fmt: skip
    return batch, leaf


def errors(name: str, length: int, mesh: SequenceMesh, call: Callable[..., Any] = run) -> Any:
    batch, leaf = batch_of(length, mesh)
    padded, whole = mesh.layout.padded_length(length), Whole(length)
    leaves = [leaf, *parameters(whole)]
    try:
        with watched_functions(), scripted_functions_in_python(), paths_as_on_one_device():
            result = call(name, batch, whole)
    except SequenceParallelError as error:
        return str(error)
    split = isinstance(next(iter(tree_leaves(result))), SequenceTensor)
    shown = [each.detach() for each in tree_leaves(whole_of(result))]
    backward(whole_of(result), 1 / mesh.layout.size)
    results, gradients = expected(name, length)
    own = [None if each.grad is None else each.grad for each in leaves]
    whole_grads = [None if each is None else comm.reduce_sum(each, mesh.sequence_group) for each in own[1:]]
    found = {"split": split, "result": distance(shown, results)}
    mine = (
        None
        if gradients[0] is None
        else shard(pad(gradients[0], padded, dim=1, value=0), mesh.layout, mesh.sequence_rank, dim=1)
    )
    return {**found, "gradient": distance([own[0], *whole_grads], [mine, *gradients[1:]])}


def distance(found: list[Any], wanted: list[Any]) -> float:
    largest = 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        ours = torch.zeros_like(theirs) if ours is None and theirs is not None else ours
        theirs = torch.zeros_like(ours) if theirs is None and ours is not None else theirs
        if ours is None:
            continue
        if ours.shape != theirs.shape:
            return float("inf")
        if ours.numel():
            error = float((ours.double() - theirs.double()).abs().max())
            largest = max(largest, error if error == error else float("inf"))  # nan is larger than any
    return largest


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.sub_(x.mean(1, keepdim=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] - grads[0].mean(1, keepdim=True)


def below_autograd(x: Tensor) -> Tensor:
    """What a mode of torch does that asks for a kernel once more."""
    with torch._C._AutoDispatchBelowAutograd():
        return x.exp()


def with_hook(module: Any) -> Any:
    module.register_full_backward_hook(lambda *_: None)
    return module


LOWEST = torch.finfo(torch.float64).min
# The first query sees no key, as a token of left padding.
HIDES_ALL = torch.zeros(16, 16, dtype=torch.float64).masked_fill(torch.arange(16)[:, None] == 0, LOWEST)
REFUSED: dict[str, Any] = {
    "learned numbers by position": lambda x: create_mask(
        lambda row, head, query, key: x[row, query, 0] > x[row, key, 0], 2, 1, 16, 16, "cpu"
    ),
    "neighbours added in place": lambda x: [y := x * 1, y[:, 1:].add_(y[:, :-1])],
    "the first token subtracted in place": lambda x: [y := x * 1, y.sub_(y[:, :1])],
    "written into windows": lambda x: x.mul(1).unfold(1, 3, 1).mul_(2),
    "written by out= of another shape": lambda x: torch.sum(x.detach(), 1, out=torch.zeros(3, dtype=x.dtype)),
    "a derivative by a transform": lambda x: torch.func.grad(lambda y: y.square().sum())(x),
    "tokens within a transform": lambda x: torch.func.jacrev(lambda b: x[0, 0] + b)(torch.ones(E, dtype=x.dtype)),
    "exchanged in place": lambda x: x.mul(1).transpose_(1, 2),
    "a backward hook": lambda x: with_hook(torch.nn.Linear(E, E, dtype=x.dtype))(x),
    "many weights at once": lambda x: torch.vmap(lambda weight: x @ weight)(torch.ones(3, E, E, dtype=x.dtype)),
    "sent": lambda x: torch.distributed.all_reduce(x),
    "below autograd": lambda x: below_autograd(x),
    "many rows at once": lambda x: torch.vmap(lambda row: row.mean(0), randomness="different")(x),
    "hooked": lambda x: x.mul(1).register_hook(print),
    "another view of memory": lambda x: x.as_strided((2, 3), (1, 1)),
    "written by an own function": lambda x: InPlace.apply(x * 1),
    "a kernel of an own function": lambda x: of_users(lambda g: g, lambda x: [x.data_ptr(), x][-1])(x[..., 0] * 1),
    "a gradient that is normed": lambda x: of_users(lambda g: g / g.norm())(x * 1),
    "a gradient that is clipped": lambda x: of_users(lambda g: g.clamp(-1, 1))(x * 1),
    "for so many tokens alone": lambda x: of_users(lambda g: g, lambda x: x.view_as(x) if x.shape[1] == 8 else 1 / 0)(
        x * 1
    ),
    "scores that are too many": lambda x: ((y := x[:, None].expand(2, 2**21, 16, E)) @ y.mT).square(),
    "a maximum with what hides all keys": lambda x: (
        torch.max((x @ x.mT) + HIDES_ALL, torch.tensor(LOWEST)).softmax(-1) @ x
    ),
    "packed documents, whole": lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3),
    "packed documents, the first tokens": lambda x: F.scaled_dot_product_attention(*[x[:, None, :12]] * 3),
    "packed documents, the last tokens": lambda x: F.scaled_dot_product_attention(*[x[:, None, 4:]] * 3),
    "packed documents, few queries": lambda x: F.scaled_dot_product_attention(x[:, None, 4:8], *[x[:, None]] * 2),
    "packed documents, few keys": lambda x: F.scaled_dot_product_attention(x[:, None], *[x[:, None, 4:8]] * 2),
    "a bias that hides all keys": lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3, attn_mask=HIDES_ALL),
}


def frames_held(stride: int) -> list[int]:
    """Return how many tokens this rank holds of a strided convolution of 64, of its pool, and of them as the operator takes them."""
    base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=2)
    mesh = SequenceMesh.build(base, ring_size=2, ulysses_size=1)
    batch, _ = batch_of(64, mesh)
    y = F.conv1d(batch[0].mT, torch.ones(E, E, 3, dtype=torch.float64), stride=stride)
    return [y.local.shape[-1], F.max_pool1d(y, stride).local.shape[-1], in_order(y.mT).local.shape[1]]


def slices_held(is_packed: bool) -> list[int]:
    """Return how many tokens this rank holds of chunks of 8 of 64 tokens, of every eighth, of the first 8, the last one, and those behind 8."""
    base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=2)
    mesh = SequenceMesh.build(base, ring_size=2, ulysses_size=1)
    x = batch_of(64, mesh, is_packed)[0][0]
    found = x[:, 16:24], x.split(8, 1)[3], x[:, ::8], x[:, :8], x[:, -1:], x[:, 8:]
    return [each.local.shape[each.placement.dim] for each in found]


def refused(names: list[str]) -> list[str]:
    """Return what each is refused with."""
    base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=2)
    mesh = SequenceMesh.build(base, ring_size=2, ulysses_size=1)
    messages = []
    for name in names:
        batch, _ = batch_of(16, mesh, name.startswith("packed documents"))
        try:
            with watched_functions(), collectives_refused(), paths_as_on_one_device():
                REFUSED[name](batch[0])
            messages.append("not refused")
        except SequenceParallelError as error:
            messages.append(str(error))
    return messages
