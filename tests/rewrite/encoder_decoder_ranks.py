"""What each rank runs in test_encoder_decoder.py, and the same on one process in plain torch; returns plain values."""

from __future__ import annotations

import traceback
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.data import DataLoader

from lightning_sp import SequenceParallelError
from lightning_sp.context.masks import build_mask
from lightning_sp.context.sequence import SequenceInfo
from lightning_sp.data.batch import sharding as data_batch
from tests.rewrite.mask_models import built_by, plain_flex
from tests.trainer.tiny import VOCAB, Plain, quiet_trainer
from tools.models.float64 import Float32AsFloat64

HEADS, DIM = 4, 32
T5 = dict(
    vocab_size=VOCAB, d_model=DIM, d_kv=8, d_ff=48, num_layers=2, num_heads=HEADS, dropout_rate=0.0, decoder_start_token_id=0
)  # fmt: skip
BART = dict(
    vocab_size=VOCAB, d_model=DIM, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
    encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
)  # fmt: skip
GEMMA = dict(
    vocab_size=VOCAB, hidden_size=DIM, intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=2,
    head_dim=8, dropout_rate=0.0, attention_dropout=0.0, attn_logit_softcapping=None, final_logit_softcapping=None,
    layer_types=["full_attention", "sliding_attention"], sliding_window=9, query_pre_attn_scalar=8,
)  # fmt: skip


class Translator(nn.Module):
    """An encoder and a decoder of one layer, as users write them; what its attention is given is of choice."""

    def __init__(self, form: str = "", lengths: tuple[int, int] = (29, 16)) -> None:
        super().__init__()
        self.form, self.lengths = form, lengths
        self.embedding, self.positions, self.head = (
            nn.Embedding(VOCAB, DIM),
            nn.Embedding(64, DIM),
            nn.Linear(DIM, VOCAB),
        )
        self.read, self.write, self.ask, self.keys = (nn.Linear(DIM, n * DIM) for n in (3, 3, 1, 2))
        read, written = lengths
        distances = torch.arange(written)[:, None] - torch.arange(read)
        self.register_buffer("near", distances.abs() % 5 != 1, persistent=False)
        self.bias = nn.Parameter(torch.randn(1, HEADS, written, read)) if form == "bias" else None
        self.slopes = nn.Parameter(torch.randn(HEADS)) if form == "flex" else None

    def forward(
        self, source: Tensor, target: Tensor, places: Tensor, target_places: Tensor, padding: Tensor | None = None, written: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        hidden = None if padding is None else padding[:, None, None].bool()
        own = None if written is None else written[:, None, None].bool()
        x = self.embedding(source) + self.positions(places)
        q, k, v = self.read(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, hidden).transpose(1, 2).flatten(2)
        y = self.embedding(target) + self.positions(target_places)
        q, k, v = self.write(y).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = y + F.scaled_dot_product_attention(q, k, v, own, is_causal=own is None).transpose(1, 2).flatten(2)
        q = self.ask(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.keys(x).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.head(y + self.cross(q, k, v, hidden).transpose(1, 2).flatten(2))

    def cross(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        if self.form == "flex":
            read, written = self.lengths
            mask = create_block_mask(lambda b, h, i, j: (i - j).abs() % 5 != 1, None, None, written, read, "cpu")

            def bend(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return score + self.slopes[head] * (query - key)

            return flex_attention(q, k, v, bend, mask)
        given = {"dense": self.near, "bias": self.bias, "causal": None}.get(self.form, hidden)
        return F.scaled_dot_product_attention(q, k, v, given, is_causal=self.form == "causal")


class TorchTransformer(nn.Module):
    """torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions, self.head = (
            nn.Embedding(VOCAB, DIM),
            nn.Embedding(64, DIM),
            nn.Linear(DIM, VOCAB),
        )
        self.inner = nn.Transformer(DIM, HEADS, 2, 2, 48, dropout=0.0, batch_first=True)

    def forward(
        self, source: Tensor, target: Tensor, places: Tensor, target_places: Tensor, padding: Tensor | None = None, written: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        x, y = (self.embedding(ids) + self.positions(at) for ids, at in ((source, places), (target, target_places)))
        causal = nn.Transformer.generate_square_subsequent_mask(y.shape[1], dtype=y.dtype)
        hidden = None if padding is None else padding == 0
        return self.head(
            self.inner(
                x, y, tgt_mask=causal, tgt_is_causal=True, src_key_padding_mask=hidden, memory_key_padding_mask=hidden
            )
        )


def hf(kind: str, **options: Any) -> nn.Module:
    from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM  # fmt: skip

    if kind == "t5gemma":
        module = {**options}
        config = CONFIG_MAPPING[kind](
            encoder=module, decoder={**module, "bos_token_id": 1}, vocab_size=VOCAB, dropout_rate=0.0
        )
    else:
        config = CONFIG_MAPPING[kind](**options)
    return AutoModelForSeq2SeqLM.from_config(config)


def bart_of_two_versions() -> nn.Module:
    """Return a BART whose encoder counts as transformers' up to 5.23 does, its decoder as 5.24's: one count has two names."""
    model = hf("bart", **BART)
    inner = model.get_submodule("model")
    for part, table in ((inner.encoder, _OfOneName), (inner.decoder, _OfAnother)):
        given = part.embed_positions
        part.embed_positions = table(*given.weight.shape)
        part.embed_positions.weight = given.weight
    return model


class _OfOneName(nn.Embedding):
    def forward(self, input_ids: Tensor, past_key_values_length: int = 0, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(past_key_values_length, past_key_values_length + input_ids.shape[1]).expand(
                len(input_ids), -1
            )
        else:
            position_ids = position_ids.unsqueeze(0)
        return super().forward(position_ids + 2)


class _OfAnother(_OfOneName):
    def forward(self, input_ids: Tensor, cache_length: int = 0, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(input_ids, cache_length, position_ids)


def bert2bert() -> nn.Module:
    from transformers import BertConfig, EncoderDecoderConfig, EncoderDecoderModel  # fmt: skip

    reads, writes = (
        BertConfig(
            vocab_size=VOCAB, hidden_size=DIM, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=48,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
        for _ in range(2)
    )  # fmt: skip
    config = EncoderDecoderConfig.from_encoder_decoder_configs(reads, writes, decoder_start_token_id=1, pad_token_id=0)
    return EncoderDecoderModel(config=config)


def with_own_count() -> nn.Module:
    """Return a model made of two, the second of which takes no positions and counts from 0."""
    from transformers import BertConfig, BertModel, EncoderDecoderModel, GPT2Config, GPT2LMHeadModel

    class CountsItself(GPT2LMHeadModel):
        def forward(
            self, input_ids: Any = None, attention_mask: Any = None, encoder_hidden_states: Any = None,
            encoder_attention_mask: Any = None, inputs_embeds: Any = None, **kwargs: Any,
        ) -> Any:  # fmt: skip
            given = {"encoder_hidden_states": encoder_hidden_states, "encoder_attention_mask": encoder_attention_mask}
            return super().forward(input_ids, attention_mask=attention_mask, return_dict=True, **given)

    reads = BertModel(
        BertConfig(vocab_size=VOCAB, hidden_size=DIM, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=48),
        add_pooling_layer=False,
    )  # fmt: skip
    gpt2 = GPT2Config(vocab_size=VOCAB, n_embd=DIM, n_layer=1, n_head=HEADS, n_positions=64, add_cross_attention=True)
    model = EncoderDecoderModel(encoder=reads, decoder=CountsItself(gpt2))
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    return model


class Headless(nn.Module):
    """A Hugging Face model without a head of its own, inside another module."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BartConfig, BartModel

        self.inner, self.head = BartModel(BartConfig(**BART)), nn.Linear(DIM, VOCAB)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, *_: Any) -> Tensor:
        return self.head(self.inner(input_ids, None, decoder_input_ids).last_hidden_state)


class WithReader(nn.Module):
    """Two Hugging Face models: one of two sequences, and a causal one that reads the encoder's."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        gpt2 = dict(
            vocab_size=VOCAB,
            n_embd=DIM,
            n_layer=1,
            n_head=HEADS,
            n_positions=64,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
        self.writer, self.reader = hf("t5", **T5), GPT2LMHeadModel(GPT2Config(**gpt2))

    def forward(self, batch: Any) -> Tensor:
        read = self.reader(input_ids=batch["input_ids"]).logits
        own = F.cross_entropy(read.flatten(0, 1), batch["input_ids"].flatten())
        return self.writer(**batch).loss + own


BUILDS: dict[str, Any] = {
    "own": Translator,
    **{form: partial(Translator, form) for form in ("dense", "bias", "causal")},
    # No shard of as many tokens as there are heads: a table of heads would be taken for one of tokens.
    "flex": partial(Translator, "flex", (29, 24)),
    "dense of 30": partial(Translator, "dense", (30, 32)),
    "bias of 30": partial(Translator, "bias", (30, 32)),
    "torch": TorchTransformer,
    "t5": partial(hf, "t5", **T5),
    "t5 gated": partial(hf, "t5", **T5, feed_forward_proj="gated-gelu"),
    "umt5": partial(hf, "umt5", **T5),
    "bart": partial(hf, "bart", **BART),
    "bart of two versions": bart_of_two_versions,
    "headless": Headless,
    "with reader": WithReader,
    "blenderbot": partial(hf, "blenderbot", **BART),
    "pegasus": partial(hf, "pegasus", **BART),
    "longt5": partial(hf, "longt5", **T5, local_radius=3),
    "longt5 with globals": partial(
        hf, "longt5", **T5, local_radius=3, encoder_attention_type="transient-global", global_block_size=4
    ),
    "m2m": partial(hf, "m2m_100", **BART, encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    "m2m of few": partial(
        hf, "m2m_100", **{**BART, "max_position_embeddings": 12}, encoder_layerdrop=0.0, decoder_layerdrop=0.0
    ),
    "bert2bert": bert2bert,
    "own count": with_own_count,
    "t5gemma": partial(hf, "t5gemma", **GEMMA),
}


class Model(Plain):
    """A model with a training step of choice; built at once, so that its weights are those of plain torch."""

    def __init__(self, build: str, kind: str = "own") -> None:
        super().__init__(None)
        torch.manual_seed(3)
        self.model, self.kind = BUILDS[build](), kind

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = getattr(self, f"_{self.kind}")(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def _own(self, batch: Any) -> Tensor:
        places, target_places = (
            batch.get(name, torch.arange(batch[ids].shape[1])) for name, ids in
            (("position_ids", "input_ids"), ("decoder_position_ids", "decoder_input_ids"))
        )  # fmt: skip
        masks = batch.get("attention_mask"), batch.get("decoder_attention_mask")
        logits = self.model(batch["input_ids"], batch["decoder_input_ids"], places, target_places, *masks)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def _hf(self, batch: Any) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # EncoderDecoderModel's, of 2021
            return self.model(**batch).loss

    def _hf_wide(self, batch: Any) -> Tensor:
        with Float32AsFloat64():  # its softmax is in float32
            return self._hf(batch)

    def _hf_labels(self, batch: Any) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            labels = batch["labels"].masked_fill(batch["labels"] == 2, -100)  # as a step may change them
            return self.model(input_ids=batch["input_ids"], labels=labels).loss

    def _hf_no_labels(self, batch: Any) -> Tensor:
        return self.model(input_ids=batch["input_ids"]).loss

    def _hf_logits(self, batch: Any) -> Tensor:
        labels = batch["labels"]
        logits = self.model(input_ids=batch["input_ids"], decoder_input_ids=batch["decoder_input_ids"]).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        held = {n: p.grad for n, p in self.named_parameters() if p.grad is not None}  # Pegasus' positions learn nothing
        self.raw_grads.append({n: g.full_tensor().clone() for n, g in held.items()})

    def _with_reader(self, batch: Any) -> Tensor:
        return self.model(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(self.model, Headless):
            return {"logits": self.model(batch["input_ids"], batch["decoder_input_ids"])}
        output = self.model(**{n: batch[n] for n in ("input_ids", "decoder_input_ids")})
        return {"logits": output.logits, "read": output.encoder_last_hidden_state, "rows": torch.ones(2)}


def rows_of(
    lengths: tuple[int, int] = (29, 16), keep: tuple[str, ...] = ("decoder_input_ids",), padding: str = ""
) -> list[dict[str, Tensor]]:
    """Two samples; some targets are ignored."""
    g = torch.Generator().manual_seed(7)
    rows = []
    for index in range(2):
        read, written = (torch.randint(2, VOCAB, (n,), generator=g) for n in lengths)
        labels = written.clone()
        labels[: 3 + 4 * index] = -100
        held = {
            "input_ids": read,
            "labels": labels,
            "decoder_input_ids": torch.cat([torch.tensor([0]), written[:-1]]),
            "attention_mask": torch.ones_like(read),
            "decoder_attention_mask": torch.ones_like(written),
        }
        if padding == "right":
            held["attention_mask"][lengths[0] - 5 - 6 * index :] = 0
        if padding == "one row":
            held["attention_mask"][: 5 * (1 - index)] = 0
        if padding == "holes":
            held["attention_mask"][1 + index :: 4] = 0
        if padding == "both":
            held["attention_mask"][: 3 + index] = 0
            held["decoder_attention_mask"][lengths[1] - 2 - 3 * index :] = 0
        masks = ["attention_mask"] * bool(padding) + ["decoder_attention_mask"] * (padding == "both")
        rows.append({n: t for n, t in held.items() if n in ("input_ids", "labels", *keep, *masks)})
    return rows


def _loader(data: Any, rows: int = 2, more: Any = ()) -> Any:
    samples = [row for each in (data, *more) for row in rows_of(**(each or {}))]
    return DataLoader(samples, batch_size=rows)  # type: ignore[arg-type]


def one_process(build: str, kind: str = "own", data: Any = None, **_: Any) -> dict[str, Any]:
    """Return loss and gradients of plain torch and plain transformers."""
    torch.set_num_threads(1)
    module = Model(build, kind).double()
    (batch,) = _loader(data)
    with patch(f"{__name__}.flex_attention", plain_flex):
        loss = module.training_step(batch, 0)
        loss.backward()
    return {
        "loss": float(loss.detach()),
        "grads": {n: p.grad for n, p in module.named_parameters() if p.grad is not None},
    }


def sharded(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit one step of each case under the strategy; the loss, the raw gradients, or the refusal."""
    return [_sharded(**case) for case in cases]


def together(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As `sharded`, but one fit of the cases that differ in their data alone, a step each; the first one's batch has the preflight."""
    fits: dict[str, list[int]] = {}
    for i, case in enumerate(cases):
        fits.setdefault(str({**case, "data": None}), []).append(i)
    found: dict[int, dict[str, Any]] = {}
    for numbers in fits.values():
        first, *others = (cases[i] for i in numbers)
        answer = _sharded(**first, more=[case.get("data") for case in others])
        for step, i in enumerate(numbers):
            found[i] = {
                "error": answer["error"],
                "losses": answer["losses"][step - len(numbers) :][:1],
                "grads": answer["all grads"][step] if len(answer["all grads"]) == len(numbers) else {},
            }
    return [found[i] for i in range(len(cases))]


def _sharded(
    build: str, kind: str = "own", data: Any = None, strategy: Any = None, world: int = 2, fault: str = "", rows: int = 2,
    more: tuple[Any, ...] | list[Any] = (),
) -> dict[str, Any]:  # fmt: skip
    module = Model(build, kind)
    declared = {"labels_shifted": True} if kind == "own" else {}
    error = ""
    try:
        with FAULTS[fault]() if fault else nullcontext():
            trainer = quiet_trainer(
                world,
                strategy={"preflight": world == 2 and not fault, **declared, **(strategy or {})},
                max_steps=1 + len(more),
            )
            trainer.fit(module, _loader(data, rows, more))
    except SequenceParallelError as refusal:
        error = str(refusal)
    except Exception as other:
        error = f"NOT BY NAME {other!r}: {traceback.format_exc()}"
    return {
        "error": error,
        "losses": module.losses,
        "grads": module.raw_grads[0] if module.raw_grads else {},
        "all grads": module.raw_grads if more else module.raw_grads[:1],
    }


def predictions(build: str, data: Any, strategy: Any, world: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what predict gives on every rank, and what one process gives."""
    module = Model(build)
    batch = next(iter(_loader(data)))
    torch.set_num_threads(1)
    with torch.no_grad():
        one = Model(build).double().eval().predict_step(batch, 0)
    (found,) = quiet_trainer(world, strategy=strategy).predict(module, _loader(data))
    return found, one


# ---- what goes silently wrong elsewhere, put back


def _shifted_on_the_shard() -> AbstractContextManager[Any]:
    """The decoder's input made of this rank's labels."""

    original = data_batch.shard_batch

    def shard(batch: Any, layout: Any, rank: int, options: Any) -> Any:
        local, info = original(batch, layout, rank, options)
        if options.decoder_inputs is not None:
            local["decoder_input_ids"] = options.decoder_inputs(local["labels"])
        return local, info

    return patch("lightning_sp.data.batch.collective_shard.shard_batch", shard)


def _own_padding_seen() -> AbstractContextManager[Any]:
    """The padding that makes the encoder's sequence divisible is attended to."""
    original = build_mask

    def mask(queries: SequenceInfo, keys: SequenceInfo, **kwargs: Any) -> Any:
        if keys is not queries:
            object.__setattr__(keys, "length", keys.padded_length)
        return original(queries, keys, **kwargs)

    return built_by(mask)


FAULTS: dict[str, Any] = {
    "decoder inputs shifted on the shard": _shifted_on_the_shard,
    "the encoder's padding is seen": _own_padding_seen,
}
