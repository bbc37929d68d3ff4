"""What each rank runs in test_shared_memory.py: importable by name in the spawned processes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import signal
import socket
import time
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.instruments.traffic import counted, ring_options
from lightning_sp.attention import AttentionMask, sequence_parallel_attention
from lightning_sp.attention.kernels.torch_flash import TorchCpuKernel
from lightning_sp.attention.schemes import query_heads
from lightning_sp.attention.schemes.network import NetworkTransport
from lightning_sp.comm.cpu import shared_memory
from lightning_sp.errors import SequenceParallelError
from lightning_sp.mesh import SequenceMesh, build_device_mesh
from tests.attention.ranks.attention_ranks import sharded
from tests.attention.ranks.operator_ranks import local_inputs, local_results
from tests.instruments.worlds import make_next_world

CLONE_NEWUTS = 0x04000000  # sched.h


def new_mesh(ring):
    base = build_device_mesh("cpu", data_parallel_size=1, sequence_parallel_size=dist.get_world_size())
    return SequenceMesh.build(base, ring_size=ring, ulysses_size=dist.get_world_size() // ring)


def attend(mesh, length, transport, dim=8, seed=0, method="hops"):
    """Return this rank's (out, dq, dk, dv), float64."""
    (q, k, v), grad = local_inputs(mesh, 4, 4, length, dim, torch.float64, seed)
    out = sequence_parallel_attention(q, k, v, mesh=mesh, mask=AttentionMask(), **ring_options(transport, method))
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


def out_of_step(ulysses, ring, transport, method, num_calls):
    """Return the results of many calls, while every rank sleeps a random time in each kernel call."""
    sleeps = random.Random(dist.get_rank())

    def slow(original):
        def call(*args, **kwargs):
            time.sleep(sleeps.choice((0, 0, 0, 0.02)))
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        # The network's results are what is expected, and are so at any pace.
        for name in ("forward", "backward") if transport == "shared_memory" else ():
            stack.enter_context(mock.patch.object(TorchCpuKernel, name, slow(getattr(TorchCpuKernel, name))))
        lengths = [48 * random.Random(seed).randrange(1, 5) for seed in range(num_calls)]
        return [
            local_results(ulysses, ring, 4, 2, lengths[seed], 8, torch.float64, seed, seed % 3 > 0, transport, method)
            for seed in range(num_calls)
        ]


def in_folder(folder, free=None):
    """Take memory from another folder from now on, and believe that so much is free, where it cannot be made small."""
    shared_memory.FOLDER = str(folder)
    if free is not None:
        shared_memory.free_bytes = lambda: free


def attend_in(folder, free, ring, lengths, transport):
    """Return, for each length, (results by network equal, signals sent, arena's size) and the warnings of all."""
    in_folder(folder, free)
    mesh = new_mesh(ring)
    answers = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in lengths:
            expected = attend(mesh, length, "network", dim=256)
            with counted() as sent:
                try:
                    found = attend(mesh, length, transport, dim=256)
                except SequenceParallelError as error:
                    answers.append(str(error))
                    continue
            bytes_sent = sent.sent_bytes
            answers.append((all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), bytes_sent))
    return answers, [str(each.message) for each in caught if issubclass(each.category, UserWarning)], used_bytes(folder)


def used_bytes(folder):
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def apart(how):
    """Build the mesh while one rank cannot share memory; return why, the refusal, its collectives, and whether "auto" keeps the law."""
    if dist.get_rank() == 1:
        if how == "machine":
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.unshare(CLONE_NEWUTS) == 0
            socket.sethostname("elsewhere")
        elif how == "folder":
            shared_memory.FOLDER = "/nowhere"
        else:
            # As the number of a process in another container: here it is another process'.
            parent = os.getppid()
            os.getpid = lambda: parent
    mesh = new_mesh(dist.get_world_size())
    refused = None
    with counted() as sent:
        try:
            attend(mesh, 48, "shared_memory")
        except SequenceParallelError as error:
            refused = str(error)
    calls = dict(sent.calls)
    same = [torch.equal(a, b) for a, b in zip(attend(mesh, 48, "auto"), attend(mesh, 48, "network"), strict=True)]
    return mesh.no_shared_memory, refused, calls, all(same)


def shared_files():
    """Return how many files of shared memory this process holds open or mapped."""
    held = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            held += os.readlink(f"/proc/self/fd/{number}").startswith(f"{shared_memory.FOLDER}/#")
    return held + sum(f"{shared_memory.FOLDER}/#" in line for line in Path("/proc/self/maps").read_text().splitlines())


def two_worlds():
    """Return the files held in a world, after it, and in a second one of the same process; and whether the law held in both."""
    counts, same = [shared_files()], []
    for world in range(2):
        if world:
            make_next_world("second")
        mesh = new_mesh(2)
        for _ in range(2):
            found, expected = attend(mesh, 64, "shared_memory"), attend(mesh, 64, "network")
            same += [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
        counts.append(shared_files())
        del mesh
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        counts.append(shared_files())
    make_next_world("third")  # the pool ends it
    return counts, all(same)


def outlived_by_its_store():
    """Return whether the law holds in a second world by shared memory, where one rank lets go of the first one's store only then."""
    attend(new_mesh(2), 64, "shared_memory")
    store = dist.distributed_c10d._get_default_store() if dist.get_rank() == 1 else None
    dist.barrier()
    dist.destroy_process_group()
    make_next_world("second", timeout_s=10)
    mesh = new_mesh(2)
    del store
    gc.collect()
    held = shared_memory.arena_of(str(mesh.ring_group.group_name)) is not None
    same = [torch.equal(a, b) for a, b in zip(attend(mesh, 64, "auto"), attend(mesh, 64, "network"), strict=True)]
    return held, all(same)


def attend_for_ever(folder, begun):
    """Attend until killed; say in the folder `begun` that it goes on."""
    in_folder(folder)
    mesh = new_mesh(4)
    for i in range(10**9):
        attend(mesh, 1024, "shared_memory")
        if i == 2:
            Path(begun, str(dist.get_rank())).write_text(str(used_bytes(folder)))


def raise_in_mid_run(folder, how):
    """Attend; in the third call one rank raises, or is killed, in the kernel."""
    in_folder(folder)
    mesh = new_mesh(4)
    original, calls = TorchCpuKernel.forward, 0

    def dying(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 10 and dist.get_rank() == 2:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("boom on rank 2")
        return original(*args, **kwargs)

    with mock.patch.object(TorchCpuKernel, "forward", dying):
        for _ in range(4):
            attend(mesh, 1024, "shared_memory")


def data_parallel_rings(transport):
    """Return the law's tensors of two rings of two ranks, side by side."""
    return sharded(1, 2, transport, heads=4, kv_heads=2, length=37, mask={})


def abandon(transport, step, hops, num_failures, method="hops"):
    """Fail in a rank's hop of a pass, catch the error and go on; return whether the later passes are right, or their errors."""
    mesh, hop = new_mesh(4), hops[dist.get_rank()]
    expected = [attend(mesh, 64, transport, seed=seed, method=method) for seed in (1, 2)]
    original, calls, failed = getattr(query_heads, step), 0, 0

    def failing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == hop + 1:
            raise ValueError("in a hop")
        return original(*args, **kwargs)

    for seed in range(num_failures):
        with mock.patch.object(query_heads, step, failing):
            calls = 0
            try:
                attend(mesh, 64, transport, seed=seed, method=method)
            except (ValueError, RuntimeError):  # the one it was given, or that another rank did not come
                failed += 1
    assert failed == num_failures
    try:
        found = [attend(mesh, 64, transport, seed=seed, method=method) for seed in (1, 2)]
    except RuntimeError as error:
        return str(error)
    return all(
        torch.equal(a, b) for ours, right in zip(found, expected, strict=True) for a, b in zip(ours, right, strict=True)
    )


def signals_kept(num_passes):
    """Return how many signals a rank still holds after many passes, some of them given up."""
    mesh = new_mesh(4)
    abandon("shared_memory", "forward_step", [2] * 4, 2)
    for seed in range(num_passes):
        attend(mesh, 32, "shared_memory", seed=seed)
    arena = shared_memory.arena_of(str(mesh.ring_group.group_name))
    arena.begin()
    return sum(map(len, arena._signals._come.values()))


def one_fails_before_all_has_come():
    """Fail on rank 0 alone, when its keys are sent and others' not come, for rank 3 is late; return whether the passes after it are right."""
    mesh, rank = new_mesh(4), dist.get_rank()
    expected = attend(mesh, 64, "network", seed=1)
    original = NetworkTransport.start_keys

    def failing(self, hop):
        started = original(self, hop)
        if hop == 3:
            raise MemoryError("on rank 0 alone")
        return started

    with torch.no_grad():
        with contextlib.ExitStack() as stack:
            if rank == 0:
                stack.enter_context(contextlib.suppress(MemoryError))
                stack.enter_context(mock.patch.object(NetworkTransport, "start_keys", failing))
            if rank == 3:
                time.sleep(1)
            forward_at_once(mesh)
        found = [forward_at_once(mesh) for _ in range(2)]
    return max(float((out - expected[0]).abs().max()) for out in found) < 1e-12


def forward_at_once(mesh):
    (q, k, v), _ = local_inputs(mesh, 4, 4, 64, 8, torch.float64, 1)
    ways = dict(ring_transport="network", ring_method="all_gather")
    return sequence_parallel_attention(q, k, v, mesh=mesh, mask=AttentionMask(), **ways)


def an_error_beside_a_dead_rank():
    """End rank 2 in its own block; the others fail in theirs a second later."""
    mesh, rank = new_mesh(4), dist.get_rank()

    def failing(*args, **kwargs):
        if rank == 2:
            os._exit(0)
        time.sleep(1)
        raise ValueError(f"the cause on rank {rank}")

    with mock.patch.object(query_heads, "forward_step", failing):
        attend(mesh, 64, "shared_memory")
