from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_sp.rewrite.query_heads import named_kv_heads, named_query_heads, tried_query_heads
from tests.rewrite import mask_models


class Anonymous(nn.Module):
    """Attention whose heads no attribute names."""

    def __init__(self, heads=6, dim=24):
        super().__init__()
        self.embedding = nn.Embedding(11, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.shape = (heads, dim // heads)
        self.kept = None

    def forward(self, input_ids, labels=None):
        q, k, v = self.qkv(self.embedding(input_ids)).unflatten(-1, (3, *self.shape)).unbind(-3)
        self.kept = q
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return out.transpose(1, 2).flatten(-2)


class Wrapper(pl.LightningModule):
    def __init__(self, model, example=None):
        super().__init__()
        self.model = model
        self.example_input_array = example


class Stranger(Anonymous):
    def forward(self, sequence):
        return super().forward(sequence)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_heads_that_no_attribute_names_are_found_by_a_forward_without_data(device, wrapped):
    with torch.device(device):
        model = Anonymous(heads=6)
    model = Wrapper(model) if wrapped else model
    assert named_query_heads(model) is None
    assert tried_query_heads(model) == (6, "")
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


class Twice(Anonymous):
    """A part that stands in two places, and a weight that two modules share."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(24, 24), nn.Linear(24, 11, bias=False)
        self.again, self.head.weight = self.first, self.embedding.weight

    def forward(self, input_ids, labels=None):
        return self.head(self.first(super().forward(input_ids)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_forward_without_data_leaves_what_stands_in_two_places(device):
    with torch.device(device):
        model = Twice()
    before = {name: id(weight) for name, weight in model.named_parameters()}
    assert tried_query_heads(model) == (6, "")
    assert {name: id(weight) for name, weight in model.named_parameters()} == before
    assert model.again.weight is model.first.weight
    assert model.head.weight is model.embedding.weight


def test_the_example_input_of_lightning_is_used():
    class Module(Wrapper):
        def forward(self, sequence):
            return self.model(sequence)

    example = torch.zeros(2, 5, dtype=torch.long)
    for given in (example, (example,), {"sequence": example}):
        assert tried_query_heads(Module(Stranger(heads=4), given)) == (4, "")


def test_a_forward_that_is_inherited_is_the_modules_own():
    class Base(Wrapper):
        def forward(self, input_ids):
            return self.other(input_ids)

    class Module(Base):
        pass

    module = Module(Anonymous(heads=4))
    module.other = Anonymous(heads=6)
    assert tried_query_heads(module) == (6, "")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Stranger(), "'sequence' takes is not known; set example_input_array"),
        (nn.Embedding(3, 4), "no call of F.scaled_dot_product_attention"),
        (Wrapper(nn.ModuleDict({"a": Anonymous()})), "failed: "),
        (nn.ModuleDict({"a": Anonymous(), "b": Anonymous()}), "not one submodule"),
    ],
)
def test_what_cannot_be_tried_says_why(model, reason):
    heads, said = tried_query_heads(model)
    assert heads is None
    assert reason in said


class Outer(nn.Module):
    """As a LightningModule that leaves `forward` out."""


@pytest.mark.parametrize(
    "build", [mask_models.Imported, partial(mask_models.Imported, True), partial(mask_models.Flex, "full")]
)
def test_heads_are_found_behind_imported_names_and_flex_attention(build):
    holder = Outer()
    holder.model = build()
    assert tried_query_heads(holder) == (mask_models.HEADS, "")


def test_a_tower_runs_whole_and_does_not_count():
    transformers = pytest.importorskip("transformers")
    small = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    vision = transformers.CLIPVisionConfig(**small, num_attention_heads=2, image_size=12, patch_size=4)
    text = transformers.LlamaConfig(**small, num_attention_heads=4, vocab_size=11)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=3)
    with torch.device("meta"):
        both, alone = transformers.LlavaForConditionalGeneration(config), transformers.CLIPVisionModel(vision)
    assert named_query_heads(both) == 4
    assert named_query_heads(alone) == 2


def test_key_value_heads_are_those_that_modules_or_configs_name():
    transformers = pytest.importorskip("transformers")
    small = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=11)
    with torch.device("meta"):
        grouped = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**small, num_attention_heads=4, num_key_value_heads=2)
        )
    assert named_kv_heads(grouped) == 2
    assert named_kv_heads(Anonymous()) is None
