"""Which layers a plan names, without a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_sp import SequenceParallelError
from lightning_sp.parallelize.tensor_parallel import check_split
from lightning_sp.parallelize.tensor_parallel.plan import split_layers
from tests.parallelize.tensor_parallel.tensor_parallel_ranks import MODELS, HuggingFace
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


def test_a_table_and_a_head_are_whole_without_a_word() -> None:
    found = split_layers(built("llama"), None)
    assert len(found.layers) == 14
    assert found.whole == ()


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


def test_heads_are_divided_where_each_rank_has_its_own() -> None:
    assert check_split(MODELS["llama"](), None, 2, {"query": 4, "key-value": 2})
    assert not check_split(tiny_gpt(num_layers=1), None, 2, {"query": 3})
