"""What each rank runs in test_preflight.py: importable by name in the spawned ranks; returns plain values."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as bound_attention
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_sp import SequenceParallelError
from lightning_sp.reductions import batch_sum
from tests.trainer.tiny import VOCAB, Plain, TokenDataset, quiet_trainer, steps_of, tiny_gpt, tiny_llama

# No module's, so that nothing puts it back.
CALLS = "CALLS_OF_STEP"  # of the environment, which nothing puts back


def hf(kind: str, **options: Any) -> nn.Module:
    """A tiny Hugging Face model with fresh weights."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # fmt: skip

    config = CONFIG_MAPPING[kind](**{"vocab_size": VOCAB, **options})
    return AutoModelForCausalLM.from_config(config)


LLAMA = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128
)  # fmt: skip
QWEN2 = {**LLAMA, "use_sliding_window": False}


class OwnPositions(nn.Module):
    """Positions made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = tiny_gpt()

    def forward(self, ids: Tensor, _: Tensor) -> Tensor:
        return self.gpt(ids, torch.arange(ids.shape[1], device=ids.device).expand_as(ids))


class Mixed(nn.Module):
    """A Llama with one more part that mixes tokens."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.llama, self.part = tiny_llama(), part
        self.embedding, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.llama(ids, positions) + self.head(self.part(self.embedding(ids)))


class CausalConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 3)

    def forward(self, x_BSE: Tensor) -> Tensor:
        return self.conv(F.pad(x_BSE.mT, (2, 0))).mT


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 16, batch_first=True)

    def forward(self, x_BSE: Tensor) -> Tensor:
        return self.gru(x_BSE)[0]


class HandWritten(nn.Module):
    def forward(self, x_BSE: Tensor) -> Tensor:
        scores = x_BSE @ x_BSE.mT
        above = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        return scores.masked_fill(above, -torch.inf).softmax(-1) @ x_BSE


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x_BSE: Tensor) -> Tensor:
        return self.norm(x_BSE.mT).mT


class Attending(nn.Module):
    """One layer of attention by a function of choice."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.attention = attention
        self.embedding, self.qkv, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 48), nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor, _: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embedding(ids)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.head(self.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def hand_written(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    scores = q @ k.mT / 8**0.5
    above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(above, -torch.inf).softmax(-1) @ v


class BehindZero(nn.Module):
    """A Llama beside a branch whose output weight begins at zero, as the head does: neither shows in a first gradient."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.llama, self.part = tiny_llama(), part
        self.embedding, self.out, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 16), nn.Linear(16, VOCAB)
        for zero in (self.out, self.head):
            nn.init.zeros_(zero.weight)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.llama(ids, positions) + self.head(x + self.out(self.part(x)))


class LongAlone(nn.Module):
    """Attention by hand beside the Llama's, where a sequence has more than 70 tokens."""

    def forward(self, x_BSE: Tensor) -> Tensor:
        return HandWritten()(x_BSE) if x_BSE.shape[1] > 70 else x_BSE


class Neighbours(nn.Module):
    """Every two neighbouring tokens have the first one's features."""

    def forward(self, x_BSE: Tensor) -> Tensor:
        return x_BSE[:, ::2].repeat_interleave(2, 1)[:, : x_BSE.shape[1]]


class Clamped(nn.Module):
    """Clamps a weight of its own in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x_BSE: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x_BSE)


class Doubled(nn.Module):
    """A parametrization without parameters."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Parametrized(Clamped):
    """Has a parametrization for the length of each forward, as PEFT's LoRA of experts' parameters has."""

    def forward(self, x_BSE: Tensor) -> Tensor:
        parametrize.register_parametrization(self.linear, "weight", Doubled())
        try:
            return self.linear(x_BSE)
        finally:
            parametrize.remove_parametrizations(self.linear, "weight", leave_parametrized=False)


class Penalised(nn.Module):
    """An L2 penalty on a weight, computed where FSDP holds it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = tiny_gpt()
        self.scale = nn.Parameter(torch.full((VOCAB,), 1.5))
        self.penalty: Tensor | None = None

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        self.penalty = self.scale.square().sum()
        return self.gpt(ids, positions) * self.scale


class NoisyEmbedding(nn.Module):
    """Noise on the embeddings while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.llama, self.noise, self.head = tiny_llama(), nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.noise(ids)
        return self.llama(ids, positions) + self.head(x + 0.1 * torch.empty_like(x).uniform_(-1, 1))


class Moving(nn.Module):
    """A GPT with a buffer that each forward moves in a way of choice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.gpt, self.how = tiny_gpt(), how
        self.register_buffer("seen", torch.zeros(3))
        if how == "balance":
            self.seen += 0.5

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits = self.gpt(ids, positions)
        if self.how == "steps":
            self.seen += 1
            return logits * (1 - 0.5 ** self.seen[0])
        if self.how == "tokens":
            self.seen += ids.numel()
        if self.how == "balance":
            # Written past autograd's version counter, as moving averages are.
            self.seen.data.add_(
                0.001 * torch.sign(logits.detach().flatten(0, 1).mean(0)[:3] - logits[0, 0, :3].detach())
            )
        if self.how == "length":
            self.seen = torch.zeros(ids.shape[1])
        return logits


def _ce(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Step(Plain):
    """A Plain with a training step of choice."""

    def __init__(self, build: Any, kind: str = "plain") -> None:
        super().__init__(build)
        self.kind = kind

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.kind == "masked_by_position":
            batch["shift_labels"][:, -1] = -100
        if self.kind == "masked_by_value":
            batch["shift_labels"] = batch["shift_labels"].masked_fill(batch["input_ids"] % 5 == 0, -100)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return getattr(self, f"_{self.kind}")(batch)

    def _masked_by_position(self, batch: Any) -> Tensor:
        return self._plain(batch)

    def _masked_by_value(self, batch: Any) -> Tensor:
        return self._plain(batch)

    def _plain(self, batch: Any) -> Tensor:
        return _ce(self.logits(batch), batch["shift_labels"])

    def _tuple(self, batch: Any) -> Tensor:
        tokens, targets, positions = batch
        return _ce(self.model(tokens, positions), targets)

    def _hf(self, batch: Any) -> Tensor:
        return _ce(self.model(batch["input_ids"], position_ids=batch["position_ids"]).logits, batch["shift_labels"])

    def _hf_bare(self, batch: Any) -> Tensor:
        return _ce(self.model(batch["input_ids"]).logits, batch["shift_labels"])

    def _hf_loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss

    def _shifts(self, batch: Any) -> Tensor:
        return _ce(self.logits(batch)[:, :-1], batch["input_ids"][:, 1:])

    def _shifts_by_roll(self, batch: Any) -> Tensor:
        return _ce(self.logits(batch), batch["input_ids"].roll(-1, 1))

    def _pooled(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.logits(batch).mean(1), batch["input_ids"][:, 0] % 7)

    def _mse(self, batch: Any) -> Tensor:
        return self._plain(batch) + 0.1 * self.logits(batch).square().mean()

    def _penalised(self, batch: Any) -> Tensor:
        return self._plain(batch) + 0.3 * self.model.penalty

    def _counted(self, batch: Any) -> dict[str, Tensor]:
        each = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten(), reduction="none")
        return {"loss": each.sum(), "num_tokens": (batch["shift_labels"] != -100).sum()}

    def _summed(self, batch: Any) -> Tensor:
        labels = batch["shift_labels"].flatten()
        return F.cross_entropy(self.logits(batch).flatten(0, 1), labels, reduction="sum") / 128

    def _over_rows(self, batch: Any) -> Tensor:
        total = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")
        return total / batch["input_ids"].shape[0]

    def _of_all_over_rows(self, batch: Any) -> Tensor:
        each = F.cross_entropy(self.logits(batch).flatten(0, 1), batch["shift_labels"].flatten(), reduction="none")
        return batch_sum(each) / batch["input_ids"].shape[0]

    def _row_means(self, batch: Any) -> Tensor:
        logits, labels = self.logits(batch), batch["shift_labels"]
        return torch.stack([F.cross_entropy(*row) for row in zip(logits, labels, strict=True)]).mean()

    def _random(self, batch: Any) -> Tensor:
        logits = self.logits(batch)
        return _ce(logits + 0.1 * torch.randn_like(logits), batch["shift_labels"])

    def _numpy_random(self, batch: Any) -> Tensor:
        return self._plain(batch) * (1 + np.random.rand())

    def _python_random(self, batch: Any) -> Tensor:
        return self._plain(batch) * (2 if random.random() < 0.5 else 1 + random.random())

    def _counts_calls(self, batch: Any) -> Tensor:
        os.environ[CALLS] = str(int(os.environ.get(CALLS, "0")) + 1)
        return self._plain(batch) * (1 + 0.1 * int(os.environ[CALLS]))

    def _draws_unused(self, batch: Any) -> Tensor:
        torch.rand(3), random.random(), np.random.rand()
        return self._plain(batch)

    def _nan(self, batch: Any) -> Tensor:
        return self._plain(batch) * torch.nan

    def _fixed_length(self, batch: Any) -> Tensor:
        if batch["input_ids"].shape[1] not in (96, 48):
            raise RuntimeError("only 96 tokens fit")
        return self._plain(batch)

    def _late(self, batch: Any) -> Tensor:
        logits = self.logits(batch)
        if steps_of(self.trainer) >= 2:
            logits = logits + 0.1 * logits.cumsum(1)
        return _ce(logits, batch["shift_labels"])

    def _later_at_most_63(self, batch: Any) -> Tensor:
        if steps_of(self.trainer) >= 2 and batch["input_ids"].shape[1] > 63:
            raise MemoryError("only 63 tokens fit beside what optimizers hold")
        return self._plain(batch)

    def _at_most_64(self, batch: Any) -> Tensor:
        if batch["input_ids"].shape[1] > 64:
            raise MemoryError("only 64 tokens fit")
        return self._plain(batch)


class Manual(Step):
    """Moves its optimizer itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2 if self.kind == "twice" else 1):
            self.manual_backward(self._plain(batch))
            optimizer.step()
        optimizer.zero_grad()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass


@contextlib.contextmanager
def lines() -> Iterator[list[str]]:
    """Collect what rank 0 tells the user."""
    found: list[str] = []
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


BUILDS: dict[str, Any] = {
    "llama": tiny_llama,
    "gpt": tiny_gpt,
    "dropout gpt": partial(tiny_gpt, dropout=0.2),
    "hf llama": partial(hf, "llama", **LLAMA),
    "hf qwen2": partial(hf, "qwen2", **QWEN2),
    "hf gpt2": partial(hf, "gpt2", n_embd=32, n_layer=1, n_head=4, n_positions=128, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0),
    "hf gemma2": partial(hf, "gemma2", **LLAMA, head_dim=8, attn_logit_softcapping=None, pad_token_id=0),
    "own positions": OwnPositions,
    "convolution": lambda: Mixed(CausalConvolution()),
    "recurrence": lambda: Mixed(Recurrence()),
    "statistics": lambda: Mixed(Statistics()),
    "hand-written too": lambda: Mixed(HandWritten()),
    "hand-written behind zero": lambda: BehindZero(HandWritten()),
    "zero": lambda: BehindZero(nn.Identity()),
    "long alone": lambda: Mixed(LongAlone()),
    "clamped": lambda: Mixed(Clamped()),
    "parametrized": lambda: Mixed(Parametrized()),
    "neighbours": lambda: Mixed(Neighbours()),
    "bound name": lambda: Attending(bound_attention),
    "hand-written": lambda: Attending(hand_written),
    "penalised": Penalised,
    "noisy embedding": NoisyEmbedding,
    **{f"moving by {how}": partial(Moving, how) for how in ("steps", "tokens", "balance", "length")},
}  # fmt: skip


# Of models of at most 64 positions.
SHORT = ("gpt", "dropout gpt", "own positions", "penalised", *(name for name in BUILDS if name.startswith("moving")))


def preflights(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit one step of each case and return what was said, or the refusal."""
    answers = []
    for case in cases:
        with lines() as said:
            try:
                _fit(**case)
                answers.append({"said": said, "error": ""})
            except SequenceParallelError as error:
                answers.append({"said": said, "error": str(error)})
            except Exception as error:
                answers.append({"said": said, "error": f"NOT BY NAME {error!r}: {traceback.format_exc()}"})
    return answers


def _fit(
    build: str, world: int = 2, kind: str = "plain", strategy: Any = None, data: Any = None, batch: str = "", **options: Any
) -> None:  # fmt: skip
    torch.manual_seed(3)
    module = (Manual if kind.startswith("manual") else Step)(BUILDS[build], kind.removeprefix("manual_"))
    samples: Any = TokenDataset(**{"size": 4, "length": 96, **(data or {})})
    if build in SHORT:
        samples = TokenDataset(**{"size": 4, "length": 64, **(data or {})})
    rows = [dict(samples[i]) for i in range(len(samples))]
    if batch == "tuple":
        rows = [(r["input_ids"], r["shift_labels"], r["position_ids"]) for r in rows]  # type: ignore[misc]
        strategy = {**(strategy or {}), "sequence_dims": {"0": 1, "1": 1, "2": 1}}
    if batch == "hf":
        rows = [{"input_ids": r["input_ids"], "labels": r["input_ids"]} for r in rows]
    if batch == "one group":
        for r in rows[:2]:  # which the first of two data-parallel groups reads
            r["shift_labels"] = torch.full_like(r["shift_labels"], -100)
    if batch == "other entries":
        for r in rows[:2]:
            r["names"] = "a"  # type: ignore[assignment]
    if batch == "other lengths":
        rows[:2] = [{n: t[:50] for n, t in r.items()} for r in rows[:2]]
    if batch == "ignored":
        for r in rows:
            r["shift_labels"] = torch.full_like(r["shift_labels"], -100)
    if batch == "late targets":
        for r in rows:
            r["shift_labels"] = r["shift_labels"].clone()
            r["shift_labels"][:70] = -100
    declared = {"packed_documents": True} if (data or {}).get("packed") else {}
    trainer = quiet_trainer(world, strategy={**declared, **(strategy or {})}, **{"max_steps": 1, **options})
    trainer.fit(module, DataLoader(rows, batch_size=2))


def zero_weights(preflight: bool) -> dict[str, Tensor]:
    """Return the weights after a step of a model that hides a branch behind zeros."""
    torch.manual_seed(3)
    module = Step(BUILDS["zero"])
    rows = [dict(each) for each in (TokenDataset(4, 64)[i] for i in range(4))]
    quiet_trainer(2, strategy={"preflight": preflight}, max_steps=1).fit(module, DataLoader(rows, batch_size=2))
    return {name: parameter.full_tensor().detach() for name, parameter in module.named_parameters()}


class Memory(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int | None, dict[str, float]]] = []

    name, version = "memory", 0  # type: ignore[assignment]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.seen.append((step, {k: float(v) for k, v in metrics.items()}))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Traces(Step):
    """Leaves traces wherever a step can."""

    def __init__(self) -> None:
        super().__init__(partial(tiny_gpt, dropout=0.2))
        self.mean = MeanMetric()
        self.register_buffer("count", torch.zeros(1), persistent=False)
        self.register_buffer("running", torch.zeros(2))
        self.generator = torch.Generator().manual_seed(1)
        self.random = random.Random(2)
        self.steps, self.history = 0, {"draws": []}
        self.target = nn.Sequential(nn.Sequential(nn.Linear(2, 2))).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._plain(batch)
        if not hasattr(self, "cache"):
            self.cache = batch["input_ids"].shape
        self.steps += 1
        for parameter in self.target.parameters():
            parameter.data.mul_(1.5)
        self.count += 64
        self.running = self.running * 0.9 + 0.1 * loss.detach()
        self.mean.update(loss.detach())
        draws = (random.random(), np.random.rand(), torch.rand(()).item())
        self.history["draws"].append((*draws, torch.rand((), generator=self.generator).item(), self.random.random()))
        self.losses.append(float(loss.detach()))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"mean": self.mean, "steps": float(self.steps)}, on_step=False, on_epoch=True)
        if self.logger is not None:
            self.logger.log_metrics({"by hand": float(self.steps)})
        return loss


def traces(world: int, preflight: bool, accumulate: int) -> dict[str, Any]:
    """Fit and return everything that a preflight might have touched."""
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)
    module, memory = Traces(), Memory()
    trainer = quiet_trainer(
        world, strategy={"preflight": preflight}, logger=memory, log_every_n_steps=1, accumulate_grad_batches=accumulate
    )
    with lines() as said:
        trainer.fit(module, DataLoader(TokenDataset(8, 64), batch_size=2))
    return {
        "said": [line for line in said if "preflight" in line],
        "losses": module.losses,
        "weights": {n: p.full_tensor().detach() for n, p in module.named_parameters()},
        "gradients": module.raw_grads,
        "buffers": dict(module.named_buffers()),
        "plain": (module.steps, module.history, tuple(module.cache)),
        "logged": (memory.seen, {k: float(v) for k, v in trainer.callback_metrics.items()}),
        "streams": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        "progress": (trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.state_dict()),
    }


def traces_with_and_without(world: int, accumulate: int) -> list[dict[str, Any]]:
    return [traces(world, preflight, accumulate) for preflight in (True, False)]


def hand_sharded(world: int) -> dict[str, Any]:
    """A loader that shards by hand."""
    import torch.distributed as dist  # fmt: skip

    from lightning_sp.layout import SequenceLayout, shard

    torch.manual_seed(3)
    layout, data = SequenceLayout(ring_size=world), TokenDataset(4, 96)
    rows = [{n: shard(t, layout, dist.get_rank(), dim=0) for n, t in data[i].items()} for i in range(4)]
    with lines() as said:
        trainer = quiet_trainer(world, strategy={"shard_batch": False, "ring_size": world}, max_steps=1)
        trainer.fit(Step(tiny_llama), DataLoader(rows, batch_size=2))
    return {"said": said, "error": ""}


def warnings_of(case: dict[str, Any]) -> list[str]:
    """Fit and return the warnings of the preflight."""
    import warnings

    found: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning
        quiet = warnings.filterwarnings
        try:
            warnings.showwarning = lambda message, *_, **__: found.append(str(message))  # type: ignore[assignment]
            warnings.filterwarnings = lambda *_, **__: None  # type: ignore[assignment]
            warnings.simplefilter("always")
            _fit(**case)
        finally:
            warnings.showwarning, warnings.filterwarnings = show, quiet
    return [each for each in found if each.startswith("preflight")]
