"""What each rank runs in test_staged_heads.py: one step of models whose heads run in stages, counted; and one block alone, measured."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.instruments.resident import peak_growth
from benchmarks.instruments.traffic import counted
from lightning_sp.config import AttentionOptions
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.context.step import SequenceContext, Step
from lightning_sp.models import LlamaConfig
from lightning_sp.models.llama import Attention, rotary_angles
from lightning_sp.rewrite import SdpaInterception, StagedHeads
from lightning_sp.rewrite.rebind import BoundNames
from tests.attention.ranks.attention_ranks import mesh_of
from tests.instruments.kernel_calls import kernel_calls
from tests.instruments.told import told
from tests.preflight.preflight_ranks import LLAMA, hf
from tests.rewrite import rewrite_ranks
from tests.trainer import scenarios
from tests.trainer.tiny import VOCAB

TWO_LAYERS = {**LLAMA, "num_hidden_layers": 2, "use_cache": False}


def ours(heads: int, kv_heads: int, dim: int, bias: float | None = None) -> nn.Module:
    """This project's own Llama."""
    sizes = dict(num_layers=2, num_heads=heads, num_kv_heads=kv_heads, hidden_dim=48, qk_bias=bias)
    return LlamaConfig(vocab_size=VOCAB, dim=dim, **sizes).build()


class Frozen(nn.Module):
    """A Llama whose embedding and whose first layer's queries and norm are frozen: what its attention is given wants no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = hf("llama", **TWO_LAYERS)
        layer = self.inner.model.layers[0]
        for part in (self.inner.model.embed_tokens, layer.input_layernorm, layer.self_attn.q_proj):
            part.requires_grad_(False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.inner(input_ids=input_ids, position_ids=position_ids).logits


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank around it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(base.in_features, 2, False), nn.Linear(2, base.out_features, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def adapted(name: str, layers: int) -> nn.Module:
    """A Llama with adapters around a projection of its first layers."""
    model = hf("llama", **TWO_LAYERS)
    for layer in model.model.layers[:layers]:
        setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    return model


def hooked() -> nn.Module:
    """A Llama that has a hook on the keys of its second layer, on rank 0 alone."""
    model = hf("llama", **TWO_LAYERS)
    if not dist.is_initialized() or dist.get_rank() == 0:
        model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *_: None)
    return model


class HookedLate(nn.Module):
    """A Llama whose forward registers a hook on the keys of its second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = hf("llama", **TWO_LAYERS)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        self.inner.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *_: None)
        return self.inner(input_ids=input_ids, position_ids=position_ids).logits


class HeadsLast(nn.Module):
    """Attention whose projections give the numbers of a head one head after the other."""

    def __init__(self, kv_heads: int = 4) -> None:
        super().__init__()
        self.head_dim = 8
        self.q_proj, self.o_proj = nn.Linear(32, 32), nn.Linear(32, 32)
        self.k_proj, self.v_proj = nn.Linear(32, 8 * kv_heads), nn.Linear(32, 8 * kv_heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (own(x).unflatten(-1, (8, -1)).permute(0, 3, 1, 2) for own in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class OtherKeys(HeadsLast):
    """Attention in which every second query head shares its keys, and which returns what it is told to."""

    def __init__(self, dim: int | None = 1, returns: str = "") -> None:
        super().__init__(kv_heads=2)
        self.dim, self.returns = dim, returns

    def forward(self, x: Tensor) -> Any:
        q, k, v = (own(x).unflatten(-1, (-1, 8)).transpose(1, 2) for own in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (t.repeat_interleave(2, 1) if self.dim is None else t.repeat(1, 2, 1, 1) for t in (k, v))
        out = self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return (out, v) if self.returns else out


class Around(nn.Module):
    """An embedding, blocks of one attention module each, and a head."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), attention()) for _ in range(2))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            found = layer(x)
            x = x + (found if isinstance(found, Tensor) else found[0])
        return self.head(x)


class Biased(HeadsLast):
    """Attention with a bias for each head."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (own(x).unflatten(-1, (-1, 8)).transpose(1, 2) for own in (self.q_proj, self.k_proj, self.v_proj))
        bias = torch.arange(4.0, dtype=x.dtype)[None, :, None, None] * torch.arange(32.0, dtype=x.dtype)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, bias[:, : q.shape[1]]).transpose(1, 2).flatten(2))


BUILDS: dict[str, Any] = {
    "ours 8/2": partial(ours, 8, 2, 32, 0.5),
    "ours 6/2": partial(ours, 6, 2, 36),
    "ours 4/4": partial(ours, 4, 4, 32),
    "ours 8/1": partial(ours, 8, 1, 32),
    "llama": partial(hf, "llama", **TWO_LAYERS),
    "llama with biases": partial(hf, "llama", **TWO_LAYERS, attention_bias=True),
    "llama with a cache": partial(hf, "llama", **{**TWO_LAYERS, "use_cache": True}),
    "llama dropout": partial(hf, "llama", **TWO_LAYERS, attention_dropout=0.1),
    "qwen3": partial(hf, "qwen3", **TWO_LAYERS, head_dim=12),
    "mistral window": partial(hf, "mistral", **TWO_LAYERS, sliding_window=9),
    "gemma2": partial(rewrite_ranks.BUILDS["gemma2"]),
    "olmo2": partial(hf, "olmo2", **TWO_LAYERS),
    "gpt neox": partial(
        hf, "gpt_neox", hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=128
    ),
    "gpt oss": rewrite_ranks.BUILDS["gpt oss"],
    "frozen": Frozen,
    "adapted output": partial(adapted, "o_proj", 2),
    "half adapted": partial(adapted, "q_proj", 1),
    "adapted": partial(adapted, "v_proj", 2),
    "hooked": hooked,
    "hooked late": HookedLate,
    "heads last": partial(Around, HeadsLast),
    "repeated keys": partial(Around, partial(OtherKeys, None)),
    "other keys": partial(Around, OtherKeys),
    "returned values": partial(Around, partial(OtherKeys, None, "values")),
    "biased": partial(Around, Biased),
}  # fmt: skip
for _name, _build in BUILDS.items():
    rewrite_ranks.BUILDS.setdefault(f"staged {_name}", _build)


def one_process(build: str, kind: str = "logits", data: Any = None) -> dict[str, Any]:
    """Return loss and gradients of plain torch and plain transformers."""
    module = rewrite_ranks.Model(f"staged {build}", kind).double()
    module.cross_entropy = F.cross_entropy
    if hasattr(module.model, "config") and (data or {}).get("packed"):
        module.model.config.use_cache = False  # transformers' own documents need that
    loss = module.training_step(rewrite_ranks.collate(rewrite_ranks.rows_of(**(data or {}))), 0)
    loss.backward()
    return {"loss": float(loss.detach()), "grads": {n: p.grad for n, p in module.named_parameters()}}


def steps(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit one step of each case under the strategy: loss and raw gradients or the refusal, what was said, and what was counted."""
    return [_step(**case) for case in cases]


def _step(build: str, **options: Any) -> dict[str, Any]:
    with kernel_calls() as kernels, counted() as traffic, told() as lines:
        found = rewrite_ranks._sharded(f"staged {build}", **options)
    said = [line for line in lines if "attention modules project" in line]
    return {**found, "kernels": len(kernels), "calls": dict(traffic.calls), "sent": traffic.sent_bytes, "told": said}


def evaluations(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Validate and predict with an untrained model, by each strategy."""
    return [scenarios.evaluate(2, *case) for case in cases]


def peak_bytes(
    ulysses: int, heads: int, kv_heads: int, dim: int, rows: int, length: int, stages: int, backward: bool = True
) -> int:
    """Return by how much this rank's memory grows over one attention module's forward, and its backward; the least of several.

    What is given, x and the gradient of what is returned, is there before, and so are the gradients of the parameters.
    """
    mesh = mesh_of(ulysses, 1)
    torch.manual_seed(0)
    module = Attention(LlamaConfig(dim=heads * dim, num_heads=heads, num_kv_heads=kv_heads), output_scale=1.0)
    tokens = length // ulysses
    x, grad = (torch.randn(rows, tokens, heads * dim) for _ in range(2))
    angles = rotary_angles(torch.arange(tokens)[None], head_dim=dim, theta=1e4, dtype=torch.float32)
    context = SequenceContext(mesh, AttentionOptions())
    context.attention_told = True
    whole = SequenceInfo(
        rows=rows, length=length, padded_length=length, boundaries=None, position_ids=None, shift_labels=None, layout=mesh.layout
    )  # fmt: skip
    peaks = []
    with SdpaInterception(context, BoundNames(module)), StagedHeads(context, [module], stages, []):
        context.begin(Step(batch=whole))
        for _ in range(3):
            leaf = x.detach().requires_grad_()
            if dist.is_initialized():
                dist.barrier()
            with peak_growth() as growth, torch.set_grad_enabled(backward):
                out = module(leaf, *angles)
                if backward:
                    out.backward(grad)
            peaks.append(growth.peak_bytes)
            del out
        context.end()
    return min(peaks[1:])
