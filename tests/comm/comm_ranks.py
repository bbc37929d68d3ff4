"""What each rank runs in test_comm.py: importable by name in the spawned processes."""

from __future__ import annotations

import gc
import time
import weakref
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.instruments.traffic import counted
from lightning_sp import comm
from lightning_sp.comm.cpu.all_pairs import all_pairs_all_gather
from lightning_sp.errors import SequenceParallelError
from lightning_sp.mesh import SequenceMesh, build_device_mesh, build_fsdp_mesh
from tests.instruments.worlds import make_next_world


def agreement(errors):
    """Return what `agree` raised on this rank when rank i holds `errors[i]`, and how long it took; then prove the group still works."""
    start = time.perf_counter()
    message = None
    try:
        comm.agree(errors[dist.get_rank()])
    except SequenceParallelError as error:
        message = str(error)
    elapsed = time.perf_counter() - start
    assert comm.reduce_sum(torch.ones(1)).item() == dist.get_world_size()
    return message, elapsed


def agreement_calls():
    with counted() as sent:
        comm.agree(None)
    return dict(sent.calls)


def gathered_dtypes(names):
    """Return, by dtype, what `gather` gives of a tensor of two elements of this rank's number, and of one without dims."""
    made = [torch.full((1, 2), dist.get_rank(), dtype=getattr(torch, name)) for name in names]
    return [[comm.gather(each, dist.group.WORLD) for each in (tensor, tensor[0, 0])] for tensor in made]


def collectives():
    """Return this rank's results of each plain collective."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    mine = torch.full((2,), float(rank))
    pairs = [comm.all_equal(torch.tensor([3, 4])), comm.all_equal(torch.tensor([3, rank]))]
    return {
        "gather": torch.stack(comm.gather(mine, world)),
        "gather_strided": torch.stack(comm.gather(torch.arange(4.0).view(2, 2).t() + rank, world)),
        "gather_objects": comm.gather_objects({"rank": rank}),
        "gather_long_objects": comm.gather_objects("x" * 2_000 * rank),
        "broadcast_object": comm.broadcast_object(f"from {rank}", world, source=1),
        "broadcast": comm.broadcast(mine.clone(), world, source=size - 1),
        "reduce_sum": comm.reduce_sum(mine),
        "untouched": mine,
        "all_equal": pairs,
        "names": (comm.group_by_name(comm.group_name(world)) is world, comm.size_of(world), comm.rank_in(world)),
        "none": (comm.group_by_name(""), comm.group_name(None), comm.size_of(None), comm.rank_in(None)),
    }


def uneven_exchange():
    """Rank r sends i + 1 elements of value 10 r + i to rank i."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = [i + 1 for i in range(size)]
    buffer = torch.cat([torch.full((n,), 10.0 * rank + i) for i, n in enumerate(sent)])
    return comm.exchange(buffer, sent, [rank + 1] * size, dist.group.WORLD)


def half_empty_transfers():
    """Even ranks alone send to their next rank; then nobody sends anything."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    even = rank % 2 == 0
    sent, received = (torch.full((3,), float(rank)), torch.empty(0)) if even else (torch.empty(0), torch.empty(3))
    neighbours, turn = ((rank + 1) % size, (rank - 1) % size), comm.next_pass(world)
    result = comm.Transfer(sent, neighbours[0], received, neighbours[1], world, turn)
    nothing = comm.Transfer(torch.empty(0), neighbours[0], torch.empty(0), neighbours[1], world, turn)
    return result.wait(), nothing.wait()


def turns_apart():
    """Send a message that nobody takes and, in the next turn, one that is; return what arrived."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    to, source, empty = (rank + 1) % size, (rank - 1) % size, torch.empty(0)
    left = comm.Transfer(torch.tensor([-1.0]), to, empty, source, world, comm.next_pass(world))
    taken = comm.Transfer(torch.tensor([float(rank)]), to, torch.empty(1), source, world, comm.next_pass(world))
    arrived = taken.wait().item(), taken.wait().item()  # twice: the second waits for nothing
    # So that nothing is left to another test of these processes.
    late = comm.Transfer(empty, to, torch.empty(1), source, world, comm.next_pass(world) - 2).wait()
    left.wait()
    return *arrived, late.item()


def groups_alive():
    """Return how many groups of a mesh live in their world, when it is made again in the same, and after its end."""
    base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=4)

    def groups():
        mesh = SequenceMesh.build(base, ring_size=2, ulysses_size=2)
        return mesh.ring_group, mesh.ulysses_group

    first = groups()
    same = [a is b for a, b in zip(first, groups(), strict=True)]
    alive = [weakref.ref(group) for group in first]
    first = base = None
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    left = sum(each() is not None for each in alive)
    make_next_world("second")  # the pool ends it
    return same, left


def summed_loss():
    """Return a loss that is the same number everywhere, built from every rank's part, and this rank's gradient."""
    rank = dist.get_rank()
    x = torch.tensor(float(rank + 1), dtype=torch.float64, requires_grad=True)
    total = comm.sum_over_ranks(x.square())
    loss = total.log()
    loss.backward()
    return loss.item(), x.grad.item()


def unequal_cotangents():
    """Return this rank's gradients where each rank goes on with a number of its own: of a sum, of gathered parts."""
    rank = dist.get_rank()
    x = torch.tensor([rank + 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    (comm.sum_over_ranks(x) * (rank + 1)).sum().backward()
    of_sum, x.grad = x.grad, None
    parts = comm.gather_over_ranks(x, dist.group.WORLD)
    sum((index + 1) * (rank + 1) * part.sum() for index, part in enumerate(parts)).backward()
    return [part.tolist() for part in parts], of_sum.tolist(), x.grad.tolist()


def same_batch(errors, digests, data_ranks, passes, stages=("train",) * 4):
    """Return what `check_same_batch` raised on this rank, None where it let the batch pass."""
    rank = dist.get_rank()
    try:
        comm.check_same_batch(
            errors[rank],
            digest=digests[rank],
            data_parallel_rank=data_ranks[rank],
            num_ring_passes=passes[rank],
            num_groups=len({*data_ranks}),
            loop={"the stage that reads a batch": stages[rank]},
        )
    except SequenceParallelError as error:
        return str(error)
    return None


def time_limits():
    """Return the time limits, in seconds, of the world and of every group that the meshes make."""
    base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=4)
    mesh = SequenceMesh.build(base, ring_size=2, ulysses_size=2)
    fsdp = build_fsdp_mesh("cpu", world_size=4, shard_size=2)
    groups = [mesh.ring_group, mesh.ulysses_group, mesh.sequence_group, mesh.data_group, *fsdp.get_all_groups()]
    cpu = torch.device("cpu")
    return comm.timeout_s(), [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]


def shared_groups(degrees, shard_sizes):
    """Return what FSDP's groups share with the attention's and the world's: pairs of names, and a wrong rank or size."""
    found = []
    for ring, ulysses in degrees:
        base = build_device_mesh("cpu", data_parallel_size=4 // (ring * ulysses), sequence_parallel_size=ring * ulysses)
        mesh = SequenceMesh.build(base, ring_size=ring, ulysses_size=ulysses)
        others = {
            "world": dist.group.WORLD, "sequence": mesh.sequence_group, "data": mesh.data_group, "ring": mesh.ring_group,
            "ulysses": mesh.ulysses_group,
        }  # fmt: skip
        for shard_size in shard_sizes:
            fsdp = build_fsdp_mesh("cpu", world_size=4, shard_size=shard_size)
            assert fsdp is build_fsdp_mesh("cpu", world_size=4, shard_size=shard_size)
            assert fsdp.shape == ((4,) if shard_size == 4 else (4 // shard_size, shard_size))
            for axis, group in zip(fsdp.mesh_dim_names, fsdp.get_all_groups(), strict=True):
                assert fsdp.get_local_rank(axis) == dist.get_rank(group)
                found += [(axis, name) for name, other in others.items() if other is group]
                total = torch.tensor([float(dist.get_rank())])
                dist.all_reduce(total, group=group)
                rank = dist.get_rank()
                first = rank // shard_size * shard_size
                ranks = (
                    range(rank % shard_size, 4, shard_size)
                    if axis == "dp_replicate"
                    else range(first, first + shard_size)
                )
                assert total.item() == sum(ranks), (axis, shard_size, total)
    return found


def late_message():
    """Return what rank 0 makes of a message that rank 1 does not send in time, and of an error of a model's."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    found = []
    if dist.get_rank() == 0:
        for act in (partial(dist.recv, torch.zeros(2), 1, group), partial(torch.zeros(2).view, 3)):
            try:
                act()
            except RuntimeError as error:
                found.append(comm.is_of_communication(error))
    dist.barrier()
    return found


def of_other_strides():
    """Return the sum, the largest and the broadcast of one matrix that rank 1 has in another order of memory."""
    places = torch.arange(6.0).view(2, 3)
    own = places.t().contiguous().t() if dist.get_rank() else places
    received = torch.zeros(3, 2).t() if dist.get_rank() else places.clone()
    return comm.reduce_sum(own), comm.largest(own), comm.broadcast(received).clone()


def named_connection_error(text):
    """Return what an error of these words is said to mean in a world."""
    return str(comm.connection_error(RuntimeError(text)))


def late_messages():
    """Wait for messages that nobody sends, in groups of a ring and of FSDP's mesh; return the seconds and words of each."""
    ring = comm.groups.group_of(((0, 2), (1, 3)))
    shard = build_fsdp_mesh("cpu", world_size=4, shard_size=2).get_group("dp_shard")
    found = []
    if dist.get_rank() in (0, 3):
        waits = (
            lambda: comm.Transfer(torch.empty(0), 1, torch.ones(1), 1 - dist.get_rank(ring), ring, 1).wait(),
            lambda: all_pairs_all_gather(torch.zeros(2), torch.ones(1), shard).wait(),
        )
        for wait in waits:
            began = time.monotonic()
            try:
                wait()
            except RuntimeError as error:
                found.append((time.monotonic() - began, str(error)))
    return found
