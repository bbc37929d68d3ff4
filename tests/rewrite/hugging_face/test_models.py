"""Which Hugging Face models' attention can be reached: that of their tokens, in a composed model that of each part."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    EncoderDecoderModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    TrOCRConfig,
    TrOCRForCausalLM,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTModel,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from lightning_sp.rewrite.hugging_face.interface import set_attention
from lightning_sp.rewrite.hugging_face.models import reachable_models, why_unreachable
from lightning_sp.rewrite.hugging_face.positions.composites import counts_of_parts
from lightning_sp.rewrite.hugging_face.positions.position_count import PositionCount
from tools.models.registry import Case
from tools.models.user import build

VIT = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
BERT = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
GPT2 = dict(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32, add_cross_attention=True)
TROCR = dict(vocab_size=40, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=24)


class OwnAttention(LlamaAttention):
    """A user's own, which calls the interface by inheritance."""


class GatedAttention(nn.Module):
    """A user's own around a model's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def vit() -> ViTModel:
    return ViTModel(ViTConfig(**VIT), add_pooling_layer=False)


def llama() -> LlamaForCausalLM:
    sizes = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes))


def composed(decoder: nn.Module, encoder: nn.Module | None = None) -> nn.Module:
    if encoder is None:
        return VisionEncoderDecoderModel(encoder=vit(), decoder=decoder)
    return EncoderDecoderModel(encoder=encoder, decoder=decoder)


@pytest.mark.parametrize("encoder", ["vit", "bert"])
def test_a_part_that_attends_by_hand_is_named(encoder):
    """Beside BERT, whose attention is seen, TrOCR's would be of each rank's own tokens without a word."""
    reads = BertModel(BertConfig(**BERT), add_pooling_layer=False) if encoder == "bert" else None
    model = composed(TrOCRForCausalLM(TrOCRConfig(**TROCR)), reads)
    assert f"{type(model).__name__} has a part whose TrOCRAttention writes attention out by hand" in why_unreachable(
        model
    )


def test_a_tower_may_attend_by_itself():
    model = build(
        Case(model_type="granite_speech", kind="seq2seq LM", class_name="GraniteSpeechForConditionalGeneration")
    )
    assert not why_unreachable(model)
    assert [type(each).__name__ for each in reachable_models(model)] == ["Blip2QFormerModel", "GraniteModel"]


@pytest.mark.parametrize(
    ("model_type", "kind", "class_name"),
    [
        ("trocr", "causal LM", "TrOCRForCausalLM"),
        ("bloom", "causal LM", "BloomForCausalLM"),
        ("data2vec-vision", "image classification", "Data2VecVisionForImageClassification"),
        ("speecht5", "speech seq2seq", "SpeechT5ForSpeechToText"),
    ],
)
def test_a_model_that_bypasses_the_interface(model_type, kind, class_name):
    model = build(Case(model_type=model_type, kind=kind, class_name=class_name))
    assert f"{class_name} does not reach its attention" in why_unreachable(model)


def test_attention_of_a_users_own_around_a_models():
    model = llama()
    assert reachable_models(model) == [model]
    (layer,) = model.model.layers
    layer.self_attn = OwnAttention(model.config, 0)
    assert not why_unreachable(model)
    layer.self_attn = GatedAttention(LlamaAttention(model.config, 0))
    assert not why_unreachable(model)


def test_parts_count_as_they_do_alone():
    """A model that is handed its decoder's positions has no such parts; nor has one of a single sequence."""
    gpt2 = GPT2LMHeadModel(GPT2Config(**GPT2))
    assert {type(part): each.of_ids for part, each in counts_of_parts(composed(gpt2)).items()} == {
        GPT2LMHeadModel: PositionCount.BY_ORDER
    }
    trocr = composed(TrOCRForCausalLM(TrOCRConfig(**TROCR)))
    assert [each.of_ids for each in counts_of_parts(trocr).values()] == [PositionCount.BY_CUMSUM]
    whisper = build(Case(model_type="whisper", kind="speech seq2seq", class_name="WhisperForConditionalGeneration"))
    t5 = build(Case(model_type="t5", kind="seq2seq LM", class_name="T5ForConditionalGeneration"))
    assert counts_of_parts(whisper) == counts_of_parts(t5) == counts_of_parts(gpt2) == {}


def test_parts_with_a_copy_of_the_configuration_have_the_attention_too(monkeypatch):
    """transformers 5.17 sets it in parts of another class of configuration alone, and T5's stacks have copies of its own."""
    config = T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config)
    assert model.encoder.config is not model.config

    def own_alone(model: Any, name: str) -> None:
        model.config._attn_implementation_internal = name

    monkeypatch.setattr(PreTrainedModel, "set_attn_implementation", own_alone)
    for name in ("eager", "sdpa"):
        set_attention(model, name)
        assert [each.config._attn_implementation for each in (model, model.encoder, model.decoder)] == [name] * 3


@pytest.mark.slow
def test_a_model_of_ones_own_does_not_import_transformers_models():
    """Which takes seconds, and says on stderr what transformers' optional packages have to say."""
    program = (
        "import sys, torch, transformers; from lightning_sp.rewrite import hugging_face_models as found; "
        "assert not found(torch.nn.Linear(1, 1)); assert 'transformers.modeling_utils' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
