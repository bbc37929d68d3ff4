"""What each rank runs in test_attention_{precision,traffic,operator}.py: importable by name in the spawned processes."""

from __future__ import annotations

import contextlib
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.instruments.resident import peak_growth
from benchmarks.instruments.traffic import counted, ring_options
from lightning_sp.attention import AttentionMask, boundaries_from_lengths, sequence_parallel_attention
from lightning_sp.attention.fakes import Outputs
from lightning_sp.attention.kernels.torch_flash import TorchCpuKernel
from lightning_sp.attention.operator import attention_backward_op, attention_op
from lightning_sp.attention.schemes import query_heads
from lightning_sp.attention.spec.codec import AttentionSpec, encode
from lightning_sp.attention.spec.scores import Scores
from lightning_sp.comm.collectives import Exchange
from lightning_sp.comm.point_to_point import Transfer
from lightning_sp.config import AttentionOptions
from lightning_sp.errors import SequenceParallelError
from lightning_sp.layout import shard
from tests.attention.ranks.attention_ranks import inputs, mesh_of


def local_inputs(mesh, heads, kv_heads, length, dim, dtype, seed=0, batch=1):
    whole = inputs(heads, kv_heads, length, batch=batch, dim=dim, dtype=dtype, seed=seed)
    q, k, v, grad = (shard(t, mesh.layout, mesh.sequence_rank, dim=2) for t in whole)
    return [t.requires_grad_(True) for t in (q, k, v)], grad


def local_results(
    ulysses, ring, heads, kv_heads, length, dim, dtype, seed, causal=True, transport="network", method="hops"
):
    """Return this rank's (out, dq, dk, dv)."""
    mesh = mesh_of(ulysses, ring)
    (q, k, v), grad = local_inputs(mesh, heads, kv_heads, length, dim, dtype, seed)
    ways = ring_options(transport, method)
    out = sequence_parallel_attention(q, k, v, mesh=mesh, mask=AttentionMask(causal), **ways)
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


def traffic(
    ulysses,
    ring,
    heads,
    kv_heads,
    length,
    dim,
    dtype,
    causal,
    lengths=None,
    transport="network",
    method="hops",
    stages=1,
):
    """Return (bytes, calls) of this rank's forward and of its backward, the second of their length."""
    if transport != "network":
        # Shared memory grows once.
        local_results(ulysses, ring, heads, kv_heads, length, dim, dtype, 0, causal, transport)
    mesh = mesh_of(ulysses, ring)
    qkv, grad = local_inputs(mesh, heads, kv_heads, length, dim, dtype)
    boundaries = boundaries_from_lengths(lengths) if lengths else None
    with counted() as forward:
        mask, ways = AttentionMask(causal, boundaries), ring_options(transport, method)
        out = sequence_parallel_attention(*qkv, mesh=mesh, mask=mask, ulysses_stages=stages, **ways)
    with counted() as backward:
        out.backward(grad)
    return [(each.sent_bytes, dict(each.calls)) for each in (forward, backward)]


def traffic_of_mask(ring, length, dim, given, size, method="hops"):
    """Return (bytes, calls) of this rank's forward and of its backward under a mask of documents of a `size`, as a matrix or a function."""
    mesh = mesh_of(1, ring)

    def seen(row, head, query, key):
        return query // size == key // size

    places = torch.arange(length)
    mask = {
        "matrix": lambda: AttentionMask(False, dense=seen(0, 0, places[:, None], places)[None, None]),
        "function": lambda: AttentionMask(False, mask_mod=seen),
        "blocks": lambda: AttentionMask(
            False, mask_mod=create_block_mask(seen, None, None, length, length, device="cpu", BLOCK_SIZE=size)
        ),
    }[given]()
    (q, k, v), grad = local_inputs(mesh, 4, 2, length, dim, torch.float32)
    with counted() as forward:
        out = sequence_parallel_attention(q, k, v, mesh=mesh, mask=mask, ring_transport="network", ring_method=method)
    with counted() as backward:
        out.backward(grad)
    return [(each.sent_bytes, dict(each.calls)) for each in (forward, backward)]


def failing_mask(ulysses, ring, length, fails):
    """Return what a rank's attention raises, whose mask's function fails on some ranks; and how far the next call is from right.

    `fails`: those ranks, or the heads that a table of the function's has.
    """
    mesh, heads = mesh_of(ulysses, ring), 4 if isinstance(fails, list) else fails
    ranks = fails if isinstance(fails, list) else []

    def seen(row, head, query, key):
        if mesh.sequence_rank in ranks:
            raise ZeroDivisionError("of the user's")
        return query >= key + torch.zeros(heads, dtype=torch.int64)[head]

    (q, k, v), _ = local_inputs(mesh, 4, 2, length, 8, torch.float32)
    try:
        sequence_parallel_attention(q, k, v, mesh=mesh, mask=AttentionMask(False, mask_mod=seen))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    ranks.clear()
    heads = 4
    again, plain = (
        sequence_parallel_attention(q, k, v, mesh=mesh, mask=mask)
        for mask in (AttentionMask(False, mask_mod=seen), AttentionMask())
    )
    return said, float((again - plain).detach().abs().max())


def blocks_in_flight(ring, length):
    """Return how many kernel calls came between the start and the wait of each hop, in the order of their start."""
    mesh, calls, started, hidden = mesh_of(1, ring), 0, {}, []

    def counting(original):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            return original(*args, **kwargs)

        return call

    def start(self, *args):
        original_start(self, *args)
        started[id(self)] = len(hidden), calls
        hidden.append(None)

    def wait(self):
        order, before = started[id(self)]
        if hidden[order] is None:
            hidden[order] = calls - before
        return original_wait(self)

    original_start, original_wait = Transfer.__init__, Transfer.wait
    (q, k, v), grad = local_inputs(mesh, 4, 2, length, 8, torch.float32)
    with contextlib.ExitStack() as stack:
        for name in ("forward", "backward"):
            stack.enter_context(mock.patch.object(TorchCpuKernel, name, counting(getattr(TorchCpuKernel, name))))
        stack.enter_context(mock.patch.object(Transfer, "__init__", start))
        stack.enter_context(mock.patch.object(Transfer, "wait", wait))
        ways = dict(ring_transport="network", ring_method="hops")
        sequence_parallel_attention(q, k, v, mesh=mesh, mask=AttentionMask(), **ways).backward(grad)
    return hidden


def exchanges_in_flight(ulysses, ring, heads, kv_heads, length, stages):
    """Return of each all-to-all how many kernel calls came between its begin and its wait, and the elements it sent, in their order."""
    mesh, calls, begun = mesh_of(ulysses, ring), 0, {}

    def counting(original):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            return original(*args, **kwargs)

        return call

    def begin(self, buffer, *args):
        original_begin(self, buffer, *args)
        begun[self] = [calls, buffer.numel()]

    def wait(self):
        begun[self][0] = calls - begun[self][0]
        return original_wait(self)

    original_begin, original_wait = Exchange.__init__, Exchange.wait
    (q, k, v), grad = local_inputs(mesh, heads, kv_heads, length, 8, torch.float32)
    with contextlib.ExitStack() as stack:
        for name in ("forward", "backward"):
            stack.enter_context(mock.patch.object(TorchCpuKernel, name, counting(getattr(TorchCpuKernel, name))))
        stack.enter_context(mock.patch.object(Exchange, "__init__", begin))
        stack.enter_context(mock.patch.object(Exchange, "wait", wait))
        ways = dict(ulysses_stages=stages, ring_transport="network", ring_method="hops")
        sequence_parallel_attention(q, k, v, mesh=mesh, mask=AttentionMask(), **ways).backward(grad)
    return list(begun.values())


def after_a_failing_stage(ulysses, ring, step):
    """Fail on all ranks in the third stage of four, the fourth under way, twice; return how often, and how far the next call is from right."""
    mesh, calls = mesh_of(ulysses, ring), 0
    original = getattr(query_heads, step)

    def failing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("in a stage")
        return original(*args, **kwargs)

    def results(stages):
        (q, k, v), grad = local_inputs(mesh, 8, 8, 64, 8, torch.float64)
        out = sequence_parallel_attention(
            q, k, v, mesh=mesh, mask=AttentionMask(), ulysses_stages=stages, ring_transport="network"
        )
        return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)

    failures = 0
    for _ in range(2):
        calls = 0
        with mock.patch.object(query_heads, step, failing):
            try:
                results(4)
            except ValueError:
                failures += 1
    errors = [float((a - b).abs().max()) for a, b in zip(results(4), results(1), strict=True)]
    return failures, max(errors)


def contract(ulysses, ring, stages, keys, saves_kv):
    """Let PyTorch check the operators' fakes, schemas and autograd on all ranks at once; `keys`: length of the keys, of 16 queries a rank."""
    mesh = mesh_of(ulysses, ring)
    sizes = mesh.layout.size
    torch.manual_seed(0)  # the mask is the same on all ranks
    q, k, v = (torch.randn(2, n, t, 8, dtype=torch.float64) for n, t in ((8, 16), (2, keys), (2, keys)))
    options = AttentionOptions(ulysses_stages=stages, ring_transport="network", ring_saves_kv=saves_kv)
    # Room for saved keys that a causal mask leaves empty is random memory, which no two calls have alike.
    mask = AttentionMask(causal=keys == 16 and not saves_kv, dense=torch.rand(1, 1, 16 * sizes, keys * sizes) < 0.9)
    code = encode(
        AttentionSpec(
            mask=mask, layout_table=None, scores=Scores(dense=mask.dense), sinks=torch.ones(8, dtype=torch.float64), scale=0.3,
            options=options, ring_group=mesh.ring_group.group_name if ring > 1 else "",
            ulysses_group=mesh.ulysses_group.group_name if ulysses > 1 else "",
        )
    )  # fmt: skip
    leaves = [t.requires_grad_(True) for t in (q, k, v)]
    utils = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(attention_op, (*leaves, *code), test_utils=utils)
    made = Outputs(*attention_op(*[t.detach() for t in leaves], *code))
    saved = [made.exchanged, made.exchanged_kv][: 1 if keys == 16 else 2]
    backward = (q.detach(), saved, made.saved_kv, made.visible, made.out, made.lse, 8, 2, False, *code)
    torch.library.opcheck(attention_backward_op, backward, test_utils=utils[::2])


@contextlib.contextmanager
def kernel_calls():
    """Count the calls of the local kernel, which stays the real one."""
    calls = {"forward": 0, "backward": 0}

    def counting(name):
        original = getattr(TorchCpuKernel, name)

        def call(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        return call

    with (
        mock.patch.object(TorchCpuKernel, "forward", counting("forward")),
        mock.patch.object(TorchCpuKernel, "backward", counting("backward")),
    ):
        yield calls


def save_attention(_, operator, *args, **kwargs):
    saved = operator is torch.ops.lightning_sp.attention.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Block(torch.nn.Module):
    """Projections around the attention: what a checkpoint recomputes."""

    def __init__(self, mesh, transport, stages=1, heads=4, kv_heads=2, dim=8):
        super().__init__()
        self.ways = dict(ulysses_stages=stages, **ring_options(transport))
        self.mesh, self.sizes, self.dim = mesh, [heads, kv_heads, kv_heads], dim
        width = heads * dim
        self.project_in = torch.nn.Linear(width, sum(self.sizes) * dim, dtype=torch.float64)
        self.project_out = torch.nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x):
        q, k, v = (t.transpose(1, 2) for t in self.project_in(x).unflatten(-1, (-1, self.dim)).split(self.sizes, 2))
        out = sequence_parallel_attention(q, k, v, mesh=self.mesh, mask=AttentionMask(), **self.ways)
        return x + self.project_out(torch.tanh(out.transpose(1, 2).flatten(2)))


def block_step(ulysses, ring, how, transport="network", stages=1):
    """Run two blocks forward and backward, and return (calls and kernel calls, every gradient).

    Args:
        how: "plain", "selective", "full" (checkpointing that saves nothing) or "compiled".
        transport: of the ring.
        stages: of Ulysses.
    """
    mesh = mesh_of(ulysses, ring)
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList([Block(mesh, transport, stages), Block(mesh, transport, stages)])
    g = torch.Generator().manual_seed(1)
    whole = torch.randn(2, 32, 32, generator=g, dtype=torch.float64)
    x = start = shard(whole, mesh.layout, mesh.sequence_rank, dim=1).requires_grad_(True)
    contexts = {
        "selective": partial(create_selective_checkpoint_contexts, save_attention),
        "full": partial(create_selective_checkpoint_contexts, []),
    }
    local_results(ulysses, ring, 4, 2, 32, 16, torch.float64, 0, transport=transport)  # shared memory grows once
    with counted() as sent, kernel_calls() as kernels:
        for block in blocks:
            if how in contexts:
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts[how])
            elif how == "compiled":
                x = torch.compile(block, backend="aot_eager", fullgraph=True)(x)
            else:
                x = block(x)
        x.square().sum().backward()
    return {**sent.calls, **kernels}, [x.detach(), start.grad, *(p.grad for p in blocks.parameters())]


def refusals(heads=3, stages=1):
    """Return the message that this rank's attention on four Ulysses ranks raises, and the collectives before it."""
    mesh = mesh_of(4, 1)
    q = torch.randn(1, heads, 8, 8)
    with counted() as sent:
        try:
            sequence_parallel_attention(q, q, q, mesh=mesh, mask=AttentionMask(), ulysses_stages=stages)
        except SequenceParallelError as error:
            return str(error), dict(sent.calls)
    return None


def short_boundaries():
    """Return the message for boundaries of the local instead of the global length, and the collectives before it."""
    mesh = mesh_of(4, 1)
    q = torch.randn(1, 4, 8, 8)
    with counted() as sent:
        try:
            mask = AttentionMask(boundaries=boundaries_from_lengths([[3, 5]]))
            sequence_parallel_attention(q, q, q, mesh=mesh, mask=mask)
        except SequenceParallelError as error:
            return str(error), dict(sent.calls)
    return None


def autocast_results(ulysses, ring):
    """Return (out, dq, dk, dv) of this rank with a float32 q and k beside a bfloat16 v under autocast."""
    mesh = mesh_of(ulysses, ring)
    (q, k, v), grad = local_inputs(mesh, 4, 2, 64, 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = sequence_parallel_attention(q, k, v.to(torch.bfloat16), mesh=mesh, mask=AttentionMask())
    out.backward(grad.to(out.dtype))
    return [out.detach(), q.grad, k.grad, v.grad]


def peak_bytes(ulysses, ring, length, lengths):
    """Return the growth of this rank's memory over a forward and backward with one head of 16."""
    mesh = mesh_of(ulysses, ring)
    qkv, grad = local_inputs(mesh, ulysses, ulysses, length, 16, torch.float32)
    mask = AttentionMask(True, boundaries_from_lengths(lengths) if lengths else None)
    dist.barrier()
    with peak_growth() as growth:
        sequence_parallel_attention(*qkv, mesh=mesh, mask=mask).backward(grad)
    return growth.peak_bytes


def settled_peak_bytes(ulysses, ring, heads, length, dim, stages=1, backward=True):
    """Return the growth of this rank's memory over a forward, and a backward.

    The least of six, after one that makes the libraries resident: what the step needs is always there, what else the process does only adds.
    """
    mesh = mesh_of(ulysses, ring)
    qkv, grad = local_inputs(mesh, heads, heads, length, dim, torch.float32)
    peaks = []
    for _ in range(7):
        for t in qkv:
            t.grad = None
        dist.barrier()
        with peak_growth() as growth, torch.set_grad_enabled(backward):
            out = sequence_parallel_attention(*qkv, mesh=mesh, mask=AttentionMask(), ulysses_stages=stages)
            if backward:
                out.backward(grad)
            dist.barrier()
        del out
        peaks.append(growth.peak_bytes)
    return min(peaks[1:])


def kept_graph(ulysses, ring):
    """Return the gradients of two backwards through one graph, and the message of a third once it is gone."""
    mesh = mesh_of(ulysses, ring)
    qkv, grad = local_inputs(mesh, 4, 2, 32, 8, torch.float64)
    out = sequence_parallel_attention(*qkv, mesh=mesh, mask=AttentionMask())
    both = [torch.autograd.grad(out, qkv, grad, retain_graph=again) for again in (True, False)]
    try:
        torch.autograd.grad(out, qkv, grad)
    except RuntimeError as error:
        return *both, str(error)
    return None


def saved_elements(ulysses, ring, heads, kv_heads, length, dim):
    """Return how many elements a forward leaves for its backward, each memory once, the caller's own q, k and v among them."""
    mesh = mesh_of(ulysses, ring)
    tokens = length // mesh.layout.size
    q, k, v = (torch.randn(1, tokens, n, dim).transpose(1, 2).requires_grad_(True) for n in (heads, kv_heads, kv_heads))
    memory = {}

    def note(tensor):
        memory[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = sequence_parallel_attention(q, k, v, mesh=mesh, mask=AttentionMask(causal=True))
    saved, given = sum(memory.values()), {t.untyped_storage().data_ptr() for t in (q, k, v)} & set(memory)
    return saved, len(given), out.untyped_storage().data_ptr() in memory
