"""Which layers a plan names, without a rank."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lightning_sp import SequenceParallelError
from lightning_sp.parallelize.tensor_parallel import check_split
from lightning_sp.parallelize.tensor_parallel.packed_layers import packed_layers
from lightning_sp.parallelize.tensor_parallel.plan import split_layers
from lightning_sp.parallelize.tensor_parallel.vocabulary import SplitVocabulary, split_vocabulary
from tests.parallelize.tensor_parallel.tensor_parallel_ranks import MODELS, HuggingFace, small_llama
from tests.trainer.tiny import tiny_gpt, tiny_llama


def built(kind: str, **sizes: Any) -> nn.Module:
    with torch.device("meta"):
        return HuggingFace(kind, **sizes)


def test_what_stands_beside_experts_is_named_and_the_attention_is_split() -> None:
    found = split_layers(built("mixtral", num_local_experts=2), None)
    assert {each.name.rpartition(".")[2] for each in found.layers} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert found.whole == (
        "model.layers.*.mlp.experts.gate_up_proj (packed_colwise)",
        "model.layers.*.mlp.experts.down_proj (rowwise)",
        "model.layers.*.mlp.experts (moe_tp_experts)",
    )
    assert found.splits_heads


class Holder(nn.Module):
    """As a LightningModule holds a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def words(model: nn.Module, plan: dict[str, str] | None = None, size: int = 2) -> SplitVocabulary:
    root = Holder(model)
    return split_vocabulary(root, split_layers(root, plan), plan, size)


def test_tables_and_heads_are_split_that_models_show_or_name() -> None:
    llama = built("llama", vocab_size=64)
    assert len(split_layers(llama, None).layers) == 14
    found = words(llama)
    assert (list(found.layers), found.whole) == (["model.inner.model.embed_tokens", "model.inner.lm_head"], ())
    assert list(words(small_llama(vocab_size=64)).layers) == ["model.embedding", "model.head"]
    assert list(words(built("gemma2", vocab_size=64)).layers) == [
        "model.inner.model.embed_tokens",
        "model.inner.lm_head",
    ]


def test_a_given_plan_names_all_that_is_split() -> None:
    plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    assert not words(built("llama", vocab_size=64), plan).layers
    found = words(built("llama", vocab_size=64), {**plan, "lm_head": "colwise_gather_output"})
    assert list(found.layers) == ["model.inner.lm_head"]
    assert list(words(small_llama(vocab_size=64), {"embedding": "embedding_rowwise"}).layers) == ["model.embedding"]


class Reads(nn.Module):
    """Has a head that it shows, and reads the table's weight."""

    tp_plan: ClassVar[dict[str, str]] = {"up": "colwise", "down": "rowwise", "table": "embedding_rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(64, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 64)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor = self.table.weight.mean()
        out: torch.Tensor = self.head(self.down(self.up(self.table(ids)))) + bias
        return out


def test_what_stays_whole_is_named_with_its_reason() -> None:
    found = words(built("llama"))
    assert not found.layers
    # In the order of the model's own plan, which is transformers'.
    assert set(found.whole) == {
        "tensor_parallel_size=2 does not divide the 61 words of model.inner.model.embed_tokens",
        "tensor_parallel_size=2 does not divide the 61 words of model.inner.lm_head",
    }
    found = words(Reads())
    assert list(found.layers) == ["model.head"]
    assert found.whole == ("a forward uses model.table in another way than by a call, and needs the whole weight",)
    counted = small_llama(vocab_size=64)
    counted.embedding.scale_grad_by_freq = True
    assert words(counted).whole == (
        "model.embedding is a lightning_sp.models.layers.NormalEmbedding, and no nn.Linear or nn.Embedding without options, nor one that scales "
        "what it has looked up",
    )
    own = Reads()
    assert split_vocabulary(own, split_layers(own, None), None, 2).whole == (
        "table is the LightningModule's own, whose weight a step may read without a call",
        "head is the LightningModule's own, whose weight a step may read without a call",
    )


def test_a_table_that_a_plan_leaves_whole_stays_so() -> None:
    model = small_llama(vocab_size=64)
    model.tp_plan = {**model.tp_plan, "embedding": "replicate"}  # type: ignore[misc]
    assert split_layers(Holder(model), None).whole == ()
    assert list(words(model).layers) == ["model.head"]


def test_a_model_whose_plan_has_no_attention_keeps_its_heads() -> None:
    found = split_layers(tiny_gpt(num_layers=2), None)
    assert [each.name for each in found.layers] == ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]
    assert not found.splits_heads
    assert not split_layers(built("olmo2"), None).splits_heads, "what is gathered has all heads"


def test_a_name_is_the_end_of_a_modules_and_a_star_one_part() -> None:
    model = nn.ModuleDict({"inner": tiny_llama(2)})
    plan = {"layers.1.feed_forward.up": "colwise", "*.attention.output": "rowwise"}
    assert [each.name for each in split_layers(model, plan).layers] == [
        "inner.layers.0.attention.output",
        "inner.layers.1.attention.output",
        "inner.layers.1.feed_forward.up",
    ]
    with pytest.raises(SequenceParallelError, match=r"1 names are of no module of the model: layers\.up"):
        split_layers(model, {"layers.up": "colwise"})


def test_a_plan_of_styles_that_are_not_carried_is_refused() -> None:
    class Experts(nn.Module):
        tp_plan = {"gate": "moe_tp_experts"}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 4)

    with pytest.raises(
        SequenceParallelError, match=r"of 1 names 1 are of styles that are not carried \(gate: moe_tp_ex"
    ):
        split_layers(Experts(), None)


def test_a_shared_weight_is_not_split() -> None:
    model = tiny_llama(2)
    first, second = (layer.feed_forward.up for layer in model.layers)  # type: ignore[union-attr]
    second.weight = first.weight
    with pytest.raises(
        SequenceParallelError, match=r"layers\.0\.feed_forward\.up shares its weight with 1 other modules"
    ):
        check_split(model, None, 2, {})


def decided(model: nn.Module, plan: dict[str, str] | None = None, size: int = 2) -> list[tuple[Any, ...]]:
    """Return parts, own numbers and reasons of the layers for several things, each once."""
    found = packed_layers(Holder(model), plan, size)[1].values()
    return list(dict.fromkeys((each.parts, tuple(sorted(dict(each.own))), each.whole) for each in found))


class Between(nn.Module):
    """Something between two layers, one of which is for several things."""

    tp_plan: ClassVar[dict[str, str]] = {"first": "packed_colwise", "last": "rowwise"}

    def __init__(self, does: Any, drops: float = 0.0) -> None:
        super().__init__()
        self.first, self.last, self.does, self.dropout = nn.Linear(8, 32), nn.Linear(16, 8), does, nn.Dropout(drops)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.dropout(self.does(self.first(x))))
        return out


def halves(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return a * b.sigmoid()


def mixed(x: torch.Tensor) -> torch.Tensor:
    return halves(x).softmax(-1)


def normed() -> nn.Module:
    model = Between(halves)
    nn.utils.parametrizations.weight_norm(model.first)
    return model


NEOX = {"query_key_value": "packed_colwise", "dense": "rowwise"}
GPT2 = {"attn.c_attn": "packed_colwise", "attn.c_proj": "rowwise"}


@pytest.mark.parametrize(
    ("model", "plan", "expected"),
    [
        # Grouped heads, and halves; an attention that reads its numbers of heads from the config.
        (
            ("phi3", {}), None,
            [((32, 16, 16), ("config.num_attention_heads", "config.num_key_value_heads", "num_key_value_heads"), ""), ((48, 48), (), "")],
        ),
        (("glm4", {}), None, [((48, 48), (), "")]),
        # Of layers that gather for a norm of all heads none is for several things.
        (("olmo2", {}), None, []),
        (("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 1, "attn_pdrop": 0.0}), GPT2, [
            ((32, 32, 32), ("config.n_head", "config.num_key_value_heads", "embed_dim", "num_heads", "split_size"), "")
        ]),
        # Head by head: rows in order are a rank's.
        (("gpt_neox", {}), NEOX, [((96,), (), "")]),
        (("gpt_bigcode", {"n_embd": 32, "n_head": 4, "n_layer": 1, "attn_pdrop": 0.0, "multi_query": False}), GPT2, [
            ((96,), ("config.n_head", "config.num_key_value_heads", "kv_heads", "num_heads"), "")
        ]),
        (partial(Between, halves), None, [((16, 16), (), "")]),
        (partial(Between, lambda x: x[..., ::2] * x[..., 1::2]), None, [((32,), (), "")]),
    ],
)  # fmt: skip
def test_parts_of_a_layer_are_found_by_a_trial(model: Any, plan: Any, expected: list[Any]) -> None:
    made = model() if callable(model) else built(model[0], **model[1])
    assert decided(made, plan) == expected


def test_modules_that_differ_are_tried_each() -> None:
    both = nn.ModuleList([Between(halves), Between(lambda x: x[..., ::2] * x[..., 1::2]), Between(halves)])
    plan = {"first": "packed_colwise", "last": "rowwise"}
    assert decided(both, plan) == [((16, 16), (), ""), ((32,), (), "")]
    with pytest.raises(
        SequenceParallelError, match=r"1\.first is split .* the forward of model\.1 gives other numbers"
    ):
        decided(nn.ModuleList([Between(halves), Between(mixed)]), plan)


def test_what_a_trial_does_not_split_is_gathered_and_named() -> None:
    one_key = decided(built("phi3", num_hidden_layers=1, num_key_value_heads=1))
    assert one_key[0][:2] == ((), ())
    assert (
        "on a rank's share of each of (32, 8, 8) outputs, tried on made-up numbers, the forward of model.inner"
        in one_key[0][2]
    )
    assert one_key[1] == ((48, 48), (), "")
    [dropped, halved] = decided(built("phi3", num_hidden_layers=1, attention_dropout=0.5))
    assert "self_attn has dropout, and ranks that split weights draw alike" in dropped[2]
    assert halved[0] == (48, 48)


@pytest.mark.parametrize(
    ("model", "plan", "words"),
    [
        pytest.param(
            partial(Between, mixed),
            None,
            "the forward of model gives other numbers; use 'colwise_gather_output'",
            id="mixed",
        ),
        (partial(Between, halves, 0.5), None, "model has dropout"),
        (
            ("gpt_bigcode", {"n_embd": 32, "n_head": 4, "n_layer": 1, "attn_pdrop": 0.0}),
            GPT2,
            r"each of \(32, 8, 8\) outputs, .* fails: RuntimeError",
        ),
        # Its bias is of all heads.
        (
            ("bloom", {"n_head": 4, "n_layer": 1}),
            NEOX,
            r"self_attention fails: RuntimeError: The expanded size of the tensor \(4\)",
        ),
        (normed, None, "model.first or the layer behind it is no plain nn.Linear"),
        (partial(Between, halves), {"first": "packed_colwise"}, "no single layer of the plan in model takes"),
    ],
)
def test_a_plan_that_a_trial_contradicts_is_refused(model: Any, plan: Any, words: str) -> None:
    made = model() if callable(model) else built(model[0], **model[1])
    with pytest.raises(SequenceParallelError, match=words):
        decided(made, plan)


def test_a_trial_leaves_a_model_as_it_was() -> None:
    model = MODELS["phi3"]()
    before = {name: dict(vars(each)) for name, each in model.named_modules()}
    state = torch.get_rng_state()
    decided(model)
    assert torch.equal(torch.get_rng_state(), state)
    for name, each in model.named_modules():
        assert vars(each).keys() == before[name].keys(), name
        assert all(vars(each)[key] is value for key, value in before[name].items()), name
        assert not each._forward_pre_hooks


def test_heads_are_divided_where_each_rank_has_its_own() -> None:
    assert check_split(MODELS["llama"](), None, 2, {"query": 4, "key-value": 2})
    assert not check_split(tiny_gpt(num_layers=1), None, 2, {"query": 3})
