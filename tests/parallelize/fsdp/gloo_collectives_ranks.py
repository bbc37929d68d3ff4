"""What each rank runs in test_gloo_collectives.py: importable by name in the spawned processes."""

from __future__ import annotations

import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from benchmarks.instruments.traffic import counted
from lightning_sp import comm
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize import accumulating, make_fsdp_root, shard_model
from lightning_sp.parallelize.fsdp.gloo_collectives import (
    AllPairsAllGather,
    AllPairsReduceScatter,
    use_all_pairs_collectives,
)
from lightning_sp.testing import max_error

CPU = torch.device("cpu")
OPERATIONS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}


def values(shape, dtype, seed, *, whole):
    """Return draws, or small whole numbers, whose sums and averages over 2, 4 or 8 ranks are exact in each dtype."""
    generator = torch.Generator().manual_seed(seed)
    if whole:
        return torch.randint(-8, 9, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def called(collective, output, *rest, async_op):
    """Call a collective as FSDP2 does; a handle must be what FSDP2 waits for, and waiting twice must change nothing."""
    work = collective(output, *rest, async_op=async_op)
    assert isinstance(work, dist.Work) if async_op else work is None
    if work is not None:
        assert work.wait()
        assert work.wait()
    return output


def gathers(n, dtype, async_op):
    """Return (own part in place, own part elsewhere, torch's default) of one all-gather."""
    world, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    own = values((n,), dtype, rank, whole=False)
    direct = AllPairsAllGather()
    inside = direct.allocate((size * n,), dtype=dtype, device=CPU)
    inside.narrow(0, rank * n, n).copy_(own)
    called(direct, inside, inside.narrow(0, rank * n, n), world, async_op=async_op)
    outside = called(direct, direct.allocate((size * n,), dtype=dtype, device=CPU), own, world, async_op=async_op)
    default = torch.empty(size * n, dtype=dtype)
    DefaultAllGather()(default, own, world)
    return inside, outside, default


def reductions(n, dtype, operation, async_op, whole):
    """Return (direct, torch's default, every rank's part for this one, whether the input is as it was) of one reduce-scatter."""
    world, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    inputs = [values((size * n,), dtype, each, whole=whole) for each in range(size)]
    parts = torch.stack([each.view(size, n)[rank] for each in inputs])
    direct = AllPairsReduceScatter()
    mine, op = inputs[rank].clone(), OPERATIONS[operation]
    output = called(direct, direct.allocate((n,), dtype=dtype, device=CPU), mine, world, op, async_op=async_op)
    default = torch.empty(n, dtype=dtype)
    DefaultReduceScatter()(default, inputs[rank].clone(), world, op)
    return output, default, parts, torch.equal(mine, inputs[rank])


def refused(operation):
    """Return what a reduce-scatter by another operation raised."""
    try:
        AllPairsReduceScatter()(torch.ones(1), torch.ones(dist.get_world_size()), dist.group.WORLD, operation)
    except SequenceParallelError as error:
        return str(error)
    return None


def absent_rank():
    """Return the error of rank 0 and its seconds, where rank 1 does not come to a gather of a group with a limit of 2 s."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    message, start = None, time.perf_counter()
    if dist.get_rank() == 0:
        try:
            # Messages have the world's limit, as a group's collectives have.
            with mock.patch("lightning_sp.comm.cpu.all_pairs.timeout_s", return_value=2.0):
                AllPairsAllGather()(torch.empty(2), torch.ones(1), group)
        except RuntimeError as error:
            message = str(error)
    elapsed = time.perf_counter() - start
    dist.barrier()
    return message, elapsed


class Block(nn.Module):
    """Sizes that no number of ranks divides, and a parameter that no loss needs."""

    def __init__(self, dtype):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7, dtype=dtype), nn.Linear(7, 5, bias=False, dtype=dtype)
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))
        self.scalar_like = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x):
        return x + self.scalar_like * self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 5, dtype=dtype)
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def batch(step, rank, dtype):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64).to(dtype)


def mesh_of(shape):
    names = ("dp_shard",) if len(shape) == 1 else ("dp_replicate", "dp_shard")
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)


def whole_gradients(model):
    return {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def train(model, steps, ranks, dtype, accumulate):
    """Return each step's gradients; each micro-batch's loss is the mean over `ranks` of theirs, or this rank's own where FSDP averages."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            data = [batch(10 * step + micro, rank, dtype) for rank in ranks]

            def backward(data=data):
                torch.stack([model(each).square().mean() for each in data]).mean().backward()

            if isinstance(model, FSDPModule) and micro < accumulate - 1:
                with accumulating(model, whole=True):
                    backward()
            else:
                backward()
        gradients.append(whole_gradients(model))
        optimizer.step()
    return gradients


def law(shape, accumulate):
    """Return (largest error, names of the gradients) of three steps of `shard_model` against one process, in float64."""
    sharded, plain = Model(torch.float64), Model(torch.float64)
    shard_model(sharded, list(sharded.blocks), mesh_of(shape))
    actual = train(sharded, 3, [dist.get_rank()], torch.float64, accumulate)
    expected = train(plain, 3, range(dist.get_world_size()), torch.float64, accumulate)
    assert [set(step) for step in actual] == [set(step) for step in expected]
    worst = max(max_error(a[name], e[name]) for a, e in zip(actual, expected, strict=True) for name in e)
    return worst, sorted(expected[0])


def by_hand(shape, policy, adjust=None):
    """Return gradients of three steps with torch's default collectives and with the direct ones."""
    found = []
    for direct in (False, True):
        model, mesh = Model(torch.float32), mesh_of(shape)
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
        if direct:
            use_all_pairs_collectives(modules, mesh)
        for each in modules:
            if adjust is not None:
                adjust(each)
        found.append(train(model, 3, [dist.get_rank()], torch.float32, 1))
    return found


def differences(shape, param_dtype, reduce_dtype):
    """Return the largest difference between default and direct under mixed precision."""
    default, direct = by_hand(shape, MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype))
    return _largest(default, direct)


def divide_by_three(module):
    module.set_gradient_divide_factor(3.0)
    module.set_force_sum_reduction_for_comms(True)


def divided(shape):
    """Return the largest difference between default and direct where FSDP2 divides by a factor of the user's."""
    default, direct = by_hand(shape, MixedPrecisionPolicy(), divide_by_three)
    return _largest(default, direct)


def _largest(default, direct):
    assert [set(step) for step in default] == [set(step) for step in direct]
    return max(max_error(b[name], a[name]) for a, b in zip(default, direct, strict=True) for name in a)


def premultiplied():
    """Return what a factor without `set_force_sum_reduction_for_comms` raised."""
    model = Model(torch.float32)
    shard_model(model, list(model.blocks), mesh_of((dist.get_world_size(),)))
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_gradient_divide_factor(3.0)
    try:
        train(model, 1, [dist.get_rank()], torch.float32, 1)
    except SequenceParallelError as error:
        return str(error)
    return None


def ahead_of_time(elements):
    """Return whether parameters gathered by `unshard(async_op=True)` are whole once their handle was waited for."""
    model = nn.Sequential(nn.Linear(elements, 1, bias=False))
    expected = model[0].weight.detach().clone()
    dist.broadcast(expected, 0)
    with torch.no_grad():
        model[0].weight.copy_(expected)
    shard_model(model, [], mesh_of((dist.get_world_size(),)))
    make_fsdp_root(model)
    if dist.get_rank() == 0:
        time.sleep(0.2)  # the others' messages cannot be there before they are waited for
    handle = model.unshard(async_op=True)
    assert handle is not None
    handle.wait()
    return torch.equal(model[0].weight, expected)


def traffic(shape, *, through_shard_model):
    """Return what one step sends by messages, the calls, and what the formula says, for `shard_model` or for FSDP2 alone."""
    model, mesh = Model(torch.float32), mesh_of(shape)
    shard_size = shape[-1]
    units = [[p for p in each.parameters()] for each in model.blocks] + [[*model.first.parameters()]]
    shards = [sum(-(-p.shape[0] // shard_size) * p[0].numel() * 4 for p in unit) for unit in units]
    # All are gathered twice and reduced once, zeros for what is not used here; the root stays gathered between forward and backward.
    expected = (shard_size - 1) * (3 * sum(shards) - shards[-1])
    if through_shard_model:
        shard_model(model, list(model.blocks), mesh)
    else:
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=mesh)
    with counted() as sent:
        model(batch(0, dist.get_rank(), torch.float32)).square().mean().backward()
    return sent.sent_bytes, expected, dict(sent.calls)


def other_backend():
    """Return the kinds of collectives after `use_all_pairs_collectives` on a mesh whose backend is not gloo."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401  (registers the backend)

    group = dist.new_group(backend="fake")
    mesh = DeviceMesh.from_group(group, "cpu")
    model = Model(torch.float32)
    fully_shard(model, mesh=mesh)
    use_all_pairs_collectives([model], mesh)
    with counted() as sent:
        model(batch(0, 0, torch.float32)).square().mean().backward()
    return comm.is_gloo_on_cpu(group), comm.is_gloo_on_cpu(dist.group.WORLD), sent.calls["isend"]
