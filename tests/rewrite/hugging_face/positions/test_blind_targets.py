"""A token that sees no key and has a target: refused where the model's own attention is eager, exact where it is torch's or has sinks."""

import pytest

from tools.models.registry import Case
from tools.models.worlds import answer


def tried(pools, model_type, class_name):
    case = Case(model_type=model_type, kind="causal LM", class_name=class_name)
    return answer(pools, case, "own loss", layouts=["1x2"])


@pytest.mark.slow
def test_eager_attention_is_refused(pools):
    found = tried(pools, "mimo_v2_flash", "MiMoV2FlashForCausalLM")
    assert found["outcome"] == "refused"
    assert (
        "MiMoV2FlashAttention's attention is eager, and a token of padding in front of a row has a target"
        in found["why"]
    )


@pytest.mark.parametrize(
    ("model_type", "class_name"),
    [("qwen2", "Qwen2ForCausalLM"), pytest.param("gpt_oss", "GptOssForCausalLM", marks=pytest.mark.slow)],
)
def test_others_are_exact(pools, model_type, class_name):
    assert tried(pools, model_type, class_name)["outcome"] == "exact"
