"""Models split over ranks: what each rank runs in the tests of this folder, importable by name; returns plain values."""

from __future__ import annotations

import random
import warnings
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import SumMetric

from lightning_sp import SequenceParallelError, linear_cross_entropy
from lightning_sp.models import GPT, GPTConfig, Llama, LlamaConfig
from lightning_sp.reductions import batch_mean, batch_sum
from lightning_sp.step.agreement.replicas import difference
from tests.trainer.tiny import VOCAB, BothWays, Plain, TokenDataset, _full, quiet_trainer, tiny_gpt, tiny_llama


class HuggingFace(nn.Module):
    """A model of transformers by its type, with grouped heads, called as the tests' own."""

    def __init__(self, kind: str, lora: dict[str, Any] | None = None, **sizes: Any) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        own: dict[str, Any] = dict(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48, head_dim=8, use_cache=False, max_position_embeddings=64, pad_token_id=0,
        )  # fmt: skip
        config = AutoConfig.for_model(kind, **{**own, **sizes})
        self.inner = AutoModelForCausalLM.from_config(config)
        if lora is not None:
            from peft import LoraConfig, get_peft_model

            lora = {"target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"], **lora}
            # Zeros at first, B would hide what A gets.
            adapter = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **lora)
            self.inner = get_peft_model(self.inner, adapter)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids=input_ids, position_ids=position_ids).logits
        return logits


class Parallel(nn.Module):
    """One layer whose attention and MLP stand side by side, both with biases, and dropout where a test asks for it."""

    tp_plan: ClassVar[dict[str, str]] = {
        **{name: "colwise" for name in ("query", "key", "value", "up")},
        **{name: "rowwise" for name in ("output", "down")},
    }

    def __init__(self, inside: float = 0.0, behind: float = 0.0) -> None:
        super().__init__()
        self.num_heads = 4
        self.embedding, self.norm = nn.Embedding(VOCAB, 32), nn.LayerNorm(32)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.up, self.output, self.down = nn.Linear(32, 48), nn.Linear(32, 32), nn.Linear(48, 32)
        self.inside, self.behind = nn.Dropout(inside), nn.Dropout(behind)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.norm(self.embedding(input_ids))
        q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.query, self.key, self.value))
        mixed = self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        mixed = mixed + self.down(self.inside(F.gelu(self.up(x))))
        return self.head(x + self.behind(mixed))


class PackedAttention(nn.Module):
    """Grouped heads out of one layer with a bias, and norms of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, 2, 8
        self.qkv, self.output = nn.Linear(32, 64), nn.Linear(32, 32)
        self.query_norm, self.key_norm = nn.RMSNorm(8), nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        width, shared = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k, v = self.qkv(x).split([width, shared, shared], dim=-1)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (q, k, v))
        q, k = self.query_norm(q), self.key_norm(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class PackedMLP(nn.Module):
    """Gate and up out of one layer, up first."""

    def __init__(self) -> None:
        super().__init__()
        # Of each of two parts two shards have no equal rows.
        self.up_gate, self.down = nn.Linear(32, 84), nn.Linear(42, 32)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.up_gate(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Packed(nn.Module):
    """One layer whose projections are packed, and its own plan."""

    tp_plan: ClassVar[dict[str, str]] = {
        **{name: "packed_colwise" for name in ("attention.qkv", "mlp.up_gate")},
        **{name: "rowwise" for name in ("attention.output", "mlp.down")},
        **{f"attention.{name}_norm": "replicated_with_grad_allreduce" for name in ("query", "key")},
    }

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = 4, 2
        self.embedding, self.norm, self.head = nn.Embedding(VOCAB, 32), nn.LayerNorm(32), nn.Linear(32, VOCAB)
        self.attention, self.mlp = PackedAttention(), PackedMLP()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = x + self.attention(self.norm(x))
        return self.head(x + self.mlp(self.norm(x)))


class OfWidth(nn.Module):
    """An attention that takes the number of features of a head from its input, as nanoGPT's does."""

    tp_plan: ClassVar[dict[str, str]] = {"attention.qkv": "packed_colwise", "attention.output": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.embedding, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.attention = NanoAttention()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.head(self.attention(self.embedding(input_ids)))


class NanoAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = 4, 32
        self.qkv, self.output = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        B, S, E = x.shape
        q, k, v = self.qkv(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(B, S, self.n_head, E // self.n_head).transpose(1, 2) for each in (q, k, v))
        return self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, E))


class Tied(nn.Module):
    """A Llama whose head is its table."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.inner = small_llama(num_layers=2, hidden_dim=48, **sizes)
        self.inner.head.weight = self.inner.embedding.weight  # type: ignore[attr-defined,union-attr]

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def small_llama(**sizes: int) -> Llama:
    """Return a Llama of other sizes."""
    return Llama(LlamaConfig(**{"vocab_size": VOCAB, "dim": 32, "num_heads": 4, "num_kv_heads": 2, **sizes}))


WORDS = 62  # VOCAB, which is odd, is not split; of these each of two ranks has 31, which two shards do not share evenly


MODELS = {
    "words": partial(small_llama, vocab_size=WORDS, num_layers=2, hidden_dim=48),
    "words of four": partial(small_llama, vocab_size=64, num_kv_heads=4, hidden_dim=48),
    "tied words": partial(Tied, vocab_size=WORDS),
    "llama words": partial(HuggingFace, "llama", vocab_size=WORDS),
    "gemma2 words": partial(HuggingFace, "gemma2", vocab_size=WORDS, sliding_window=8, final_logit_softcapping=3.0),
    "lora head": partial(HuggingFace, "llama", vocab_size=WORDS, lora={"target_modules": ["q_proj", "lm_head"]}),
    "gpt words": lambda: GPT(GPTConfig(vocab_size=WORDS, dim=32, num_layers=2, num_heads=4, max_positions=64)),
    "lora words": partial(HuggingFace, "llama", vocab_size=WORDS, lora={}),
    # Of its MLP each of two parts has 21 rows, which two shards do not share evenly.
    "uneven": partial(small_llama, hidden_dim=42, vocab_size=WORDS),
    "llama": partial(tiny_llama, num_layers=2),
    "gpt": partial(tiny_gpt, num_layers=2),
    "tied": Tied,
    "parallel": Parallel,
    "dropout inside": partial(Parallel, inside=0.5),
    "dropout behind": partial(Parallel, behind=0.5),
    "qwen3": partial(HuggingFace, "qwen3"),
    "olmo2": partial(HuggingFace, "olmo2"),
    "qwen2": partial(HuggingFace, "qwen2"),
    "phi3": partial(HuggingFace, "phi3"),
    "phi3 of four": partial(HuggingFace, "phi3", num_hidden_layers=1, num_key_value_heads=4),
    "packed": Packed,
    "of width": OfWidth,
    "packed lora": partial(
        HuggingFace,
        "phi3",
        num_hidden_layers=1,
        lora={"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"]},
    ),
    "gpt2": partial(
        HuggingFace,
        "gpt2",
        n_embd=32,
        n_head=4,
        n_layer=1,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "lora of gathered": partial(HuggingFace, "olmo2", num_hidden_layers=1, lora={}),
    "mixtral": partial(HuggingFace, "mixtral", num_local_experts=2, experts_implementation="eager"),
    "lora": partial(HuggingFace, "llama", lora={}),
    "lora dropout": partial(HuggingFace, "llama", lora={"lora_dropout": 0.5}),
    "dora": partial(HuggingFace, "llama", lora={"use_dora": True}),
    "no plan": BothWays,
    "three heads": partial(small_llama, dim=24, num_heads=3, num_kv_heads=3),
    "one key": partial(small_llama, num_kv_heads=1),
    "odd": partial(small_llama, hidden_dim=45),
}


class Noted(Plain):
    """Notes what a fit made of the parameters."""

    def __init__(self, name: str, adds_rank: bool = False, loss: str = "") -> None:
        super().__init__(MODELS[name])
        self.adds_rank, self.loss = adds_rank, loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.loss:
            total = getattr(self, self.loss)(batch)
            self.losses.append(float(total.detach()))
            return total
        loss = super().training_step(batch, batch_idx)
        return loss + dist.get_rank() if self.adds_rank else loss

    def smoothed(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.logits(batch)
        z = batch_mean(logits.logsumexp(-1).square(), batch["shift_labels"] != -100)
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), label_smoothing=0.1) + 1e-2 * z

    def penalized(self, batch: dict[str, Tensor]) -> Tensor:
        """Add a penalty of all weights behind the model, which are gathered there where nothing frees them."""
        loss = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())
        return loss + 1e-3 * sum(each.square().sum() for each in self.parameters())

    def linear(self, batch: dict[str, Tensor]) -> Tensor:
        model, head = self.model, self.model.head
        model.head = nn.Identity()
        try:
            hidden = model(batch["input_ids"], batch["position_ids"])
        finally:
            model.head = head
        return linear_cross_entropy(hidden, head, batch["shift_labels"], transform=lambda x: 3 * torch.tanh(x / 3))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=self.lr)


def fits(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run several fits in one call."""
    return [fit(**case) for case in cases]


def fit(
    name: str,
    world: int,
    strategy: dict[str, Any] | None = None,
    *,
    save: str = "",
    resume: str = "",
    rows: int = 4,
    adds_rank: bool = False,
    loss: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Fit a model; return losses, raw gradients, weights, and which parameters are split over ranks.

    Args:
        name: of the model.
        world: ranks.
        strategy: its options.
        save: path of a checkpoint at the end.
        resume: path of one to begin with.
        rows: of each optimizer step's micro-batches.
        adds_rank: to each loss.
        loss: the method that computes it, if not a plain cross entropy.
        options: of the Trainer.
    """
    torch.manual_seed(3)
    module, strategy = Noted(name, adds_rank, loss), strategy or {}
    trainer = quiet_trainer(world, strategy=strategy, **{"max_epochs": 1, **options})
    micro = rows // strategy.get("data_parallel_size", 1)
    data = DataLoader(TokenDataset(12), batch_size=micro)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data, ckpt_path=resume or None, weights_only=True)
    if save:
        trainer.save_checkpoint(save)
    split = [
        each
        for each, parameter in module.named_parameters()
        if isinstance(parameter, DTensor) and "tensor_parallel" in parameter.device_mesh.mesh_dim_names
        if parameter.placements[-1].is_shard()
    ]
    return {
        "losses": module.losses,
        "grads": module.raw_grads,
        "weights": {each: _full(parameter.detach()).clone() for each, parameter in module.named_parameters()},
        "split": split,
        "warned": [str(each.message) for each in caught],
        "mesh": trainer.strategy.sequence_mesh.describe(),
    }


def refusal(**case: Any) -> str:
    """Return the refusal that a fit ends in."""
    try:
        fit(**case)
    except SequenceParallelError as error:
        return str(error)
    return "NOT REFUSED"


def refusals(cases: list[dict[str, Any]]) -> list[str]:
    """Return those of several."""
    return [refusal(**case) for case in cases]


class Counted(Plain):
    """Adds up its targets in each way that a step has, and trains by a sum over rows."""

    def __init__(self) -> None:
        super().__init__(partial(tiny_llama, num_layers=1))
        self.targets = SumMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, targets = self.logits(batch), batch["shift_labels"]
        each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        count = (targets != -100).sum()
        self.log("targets", count.double(), reduce_fx="sum", sync_dist=True)
        loss = batch_sum(each, targets != -100) / batch_sum(torch.ones_like(each), targets != -100)
        self.log("loss", loss, reduce_fx="sum", sync_dist=True)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.targets.update((batch["shift_labels"] != -100).sum())
        self.log("counted", self.targets)
        loss = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten())
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch["input_ids"]))


def counted(world: int, strategy: dict[str, Any]) -> dict[str, float]:
    """Fit and validate; return every number that was logged, the losses, and norms of the weights."""
    torch.manual_seed(3)
    module = Counted()
    trainer = quiet_trainer(world, strategy=strategy, max_epochs=1)
    trainer.fit(module, DataLoader(TokenDataset(8), batch_size=4), DataLoader(TokenDataset(4), batch_size=2))
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found |= {f"loss {step}": loss for step, loss in enumerate(module.losses[-2:])}
    return found | {name: float(_full(each.detach()).norm()) for name, each in module.named_parameters()}


class Shuffled(IterableDataset):
    """Samples in an order that no other process has."""

    def __iter__(self) -> Any:
        data = TokenDataset(8)
        yield from (data[index] for index in random.SystemRandom().sample(range(8), 8))


def streamed(world: int, strategy: dict[str, Any]) -> list[float]:
    """Fit on such a stream; return the losses."""
    torch.manual_seed(3)
    module = Plain(partial(tiny_llama, num_layers=1))
    trainer = quiet_trainer(world, strategy={**strategy, "preflight": False}, max_epochs=1)
    trainer.fit(module, DataLoader(Shuffled(), batch_size=2))
    return module.losses


def drifted(world: int, strategy: dict[str, Any]) -> str | None:
    """Fit, change a norm on one rank alone, and return what the comparison of replicas says."""
    module = Plain(partial(tiny_llama, num_layers=1))
    trainer = quiet_trainer(world, strategy=strategy, max_steps=1)
    trainer.fit(module, DataLoader(TokenDataset(4), batch_size=2))
    assert difference(module, 1, 1, None) is None
    if dist.get_rank() == 1:
        weight: Any = module.model.norm.weight
        weight.detach().to_local().add_(1e-9)
    return difference(module, 1, 1, None)
