"""How Hugging Face models count the positions of their tokens, found by experiment."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lightning_sp.rewrite.hugging_face.positions.composites import count_of_text_model
from lightning_sp.rewrite.hugging_face.positions.position_count import PositionCount, position_counts
from tests.rewrite.hugging_face.positions.positions_ranks import BUILDS
from tools.models.registry import Case
from tools.models.user import build

COUNTS = {
    "llama": PositionCount.BY_ORDER, "gpt2": PositionCount.BY_ORDER, "bert": PositionCount.BY_ORDER, "phi": PositionCount.BY_ORDER,
    "roberta": PositionCount.BY_CUMSUM, "esm": PositionCount.BY_CUMSUM, "opt": PositionCount.BY_CUMSUM, "mpnet": PositionCount.BY_CUMSUM,
    "bart decoder": PositionCount.OWN_WAY, "trocr": PositionCount.OWN_WAY, "roformer": PositionCount.OWN_WAY,
    "nystromformer": PositionCount.OWN_WAY,
}  # fmt: skip


class Counting(PreTrainedModel):
    """Counts positions in a way of choice."""

    config_class = PretrainedConfig

    def __init__(self, way: str) -> None:
        super().__init__(PretrainedConfig(pad_token_id=1, bos_token_id=None))
        self.way = way
        self.ids, self.places = nn.Embedding(61, 8), nn.Embedding(64, 8)
        self.layers = nn.ModuleList([nn.ModuleDict({"attention": nn.Linear(8, 8)})])

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if position_ids is None:
            position_ids = {
                "order": torch.arange(input_ids.shape[1]),
                "from one": torch.arange(input_ids.shape[1]) + 1,
                "behind": torch.arange(input_ids.shape[1]) + 2,
                "mask": (mask.cumsum(-1) - 1).clamp(min=0),
                "filled": (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 1),
                "ids": torch.cumsum(input_ids != 1, 1),
                "backwards": mask.flip(1).cumsum(1).flip(1),
                "ends": mask.sum(1, keepdim=True) - torch.arange(input_ids.shape[1]).clamp(max=0),
            }[self.way]
        return self.ids(input_ids) + self.places(position_ids)


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_models_of_transformers(name, count):
    model = BUILDS[name]()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    assert position_counts(model).of_ids is count
    assert torch.equal(torch.rand(3), expected), "no random number is drawn"
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    assert not any(each._forward_pre_hooks for each in model.modules())


@pytest.mark.parametrize(
    ("way", "count"),
    [
        ("order", PositionCount.BY_ORDER),
        ("from one", PositionCount.FROM_ONE),
        ("behind", PositionCount.OWN_WAY),
        ("mask", PositionCount.BY_CUMSUM),
        ("filled", PositionCount.BY_CUMSUM),
        ("ids", PositionCount.BY_CUMSUM),
        ("backwards", PositionCount.OWN_WAY),
        ("ends", PositionCount.OWN_WAY),
    ],
)
def test_ways_of_counting_that_no_list_names(way, count):
    assert position_counts(Counting(way)).of_ids is count


@pytest.mark.parametrize(
    ("name", "count"),
    [("roberta", PositionCount.OWN_WAY), ("opt", PositionCount.BY_CUMSUM), ("bert", PositionCount.BY_ORDER)],
)
def test_embeddings_in_place_of_ids(name, count):
    assert position_counts(BUILDS[name]()).of_embeddings is count


def test_a_model_that_fails_on_tokens_alone_shows_nothing():
    model = BUILDS["blip-2"]()
    assert not position_counts(model).were_seen
    assert all(position_counts(BUILDS[name]()).were_seen for name in ("llama", "roberta"))
    [(part, counts)] = count_of_text_model(model).items()
    assert part is model.language_model
    assert counts.of_embeddings is PositionCount.BY_CUMSUM


def test_a_table_that_is_asked_for_nothing_is_no_lookup():
    """ESMC's classifier looks its ids up though it was given embeddings."""
    model = build(Case(model_type="esmc", kind="sequence classification", class_name="EsmcForSequenceClassification"))
    assert position_counts(model).of_ids is PositionCount.BY_ORDER
