"""PEFT's adapters train as on one device, are saved alone and loaded by plain PEFT; so do tokens before the sequence."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from lightning_sp import SequenceParallelError, export_checkpoint
from lightning_sp.checkpoint import read_checkpoint_folder
from lightning_sp.testing import max_error
from tests.slow import slow
from tests.trainer.pretrained import tuned_ranks as ranks
from tests.trainer.pretrained.pretrained_ranks import save_pretrained

pytest.importorskip("peft")

RING, ULYSSES = dict(ring_size=2), dict(ulysses_size=2)
CASES = [
    dict(kind="lora", place="__init__", strategy=ULYSSES),
    dict(kind="lora, head", place="configure_model", strategy=ULYSSES),
    dict(kind="dora", place="__init__", strategy=RING),
    dict(kind="ia3", place="configure_model", strategy=RING),
]
MORE_CASES = [
    dict(kind="lora", place="configure_model", strategy=RING),
    dict(kind="dora", place="configure_model", strategy=ULYSSES),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("base"))
    save_pretrained(folder, False)
    return folder


@pytest.fixture(scope="module")
def wide_base(tmp_path_factory):
    """One that bitsandbytes can pack: whole blocks of 64 numbers in a row."""
    folder = str(tmp_path_factory.mktemp("wide"))
    save_pretrained(folder, False, hidden_size=64, intermediate_size=64)
    return folder


def same(actual, expected, case):
    assert not expected["error"], (case, expected["error"])
    assert not actual["error"], (case, actual["error"])
    assert actual["trained"] == expected["trained"], case
    assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-10), case
    for name, weight in expected["weights"].items():
        assert max_error(actual["first"][name], expected["first"][name]) == 0, (case, name)
        assert max_error(actual["weights"][name], weight) < 1e-10, (case, name)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [pytest.param(CASES, id="most"), pytest.param(MORE_CASES, id="more")])
def test_adapters_train_as_on_one_device(pools, base, cases):
    alone = pools(1).run(ranks.runs, [{**case, "strategy": None, "world": 1, "folder": base} for case in cases])[0]
    for answers in pools(2).run(ranks.runs, [dict(world=2, folder=base, **case) for case in cases]):
        for case, actual, expected in zip(cases, answers, alone, strict=True):
            same(actual, expected, case)
            assert 0 < len(actual["trained"]) < len(actual["weights"])
            assert actual["optimized"] == len(actual["trained"]), "the optimizer holds adapters alone"


@pytest.mark.slow
def test_adapters_of_float32_on_a_bfloat16_base_keep_their_dtypes(pools, base):
    case = dict(kind="lora", folder=base, model=dict(dtype=torch.bfloat16), precision="32-true")
    (expected,) = pools(1).run(ranks.runs, [dict(strategy=None, world=1, **case)])[0]
    for (actual,) in pools(2).run(ranks.runs, [dict(strategy=RING, world=2, **case)]):
        assert not actual["error"], actual["error"]
        assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-2)
        for name, weight in expected["weights"].items():
            assert (
                actual["weights"][name].dtype == weight.dtype == (torch.float32 if "lora" in name else torch.bfloat16)
            )
            assert max_error(actual["first"][name], expected["first"][name]) == 0


# PEFT itself asks transformers by the old name.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_plain_peft_loads_what_was_saved(pools, base, tmp_path):
    saved, checkpoint = str(tmp_path / "adapters"), str(tmp_path / "folder")
    case = dict(kind="lora, head", folder=base, strategy=RING, world=2, saved=saved, checkpoint=checkpoint)
    for (found,) in pools(2).run(ranks.runs, [case]):
        assert not found["error"], found["error"]
        assert found["live"].startswith("SequenceParallelError: PeftModelForCausalLM.save_pretrained: every rank")
        assert "state = trainer.strategy.whole_state_dict(model); if trainer.is_global_zero: " in found["live"]
    names = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert "adapter_config.json" in names
    assert (tmp_path / "adapters" / "adapter_model.safetensors").stat().st_size < 40_000, "adapters alone"
    loaded = ranks.plain(base, saved)
    exported = torch.load(export_checkpoint(checkpoint, tmp_path / "m.pt", prefix="model."), weights_only=True)
    assert set(exported) == set(loaded)
    for name, value in loaded.items():
        trained = found["weights"].get(f"model.{name}")
        assert max_error(value.double(), exported[name].double()) < 1e-6, name
        assert trained is None or max_error(value.double(), trained) < 1e-6, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_plain_peft_loads_a_checkpoint_of_adapters_alone(pools, base, tmp_path):
    built, strategy = dict(kind="lora, head", folder=base), dict(exclude_frozen_parameters=True, **ULYSSES)
    case = dict(strategy=strategy, world=2, checkpoint=str(tmp_path / "adapters.ckpt"), **built)
    for (found,) in pools(2).run(ranks.runs, [case]):
        assert not found["error"], found["error"]
    stored = read_checkpoint_folder(case["checkpoint"])["state_dict"]
    assert sorted(stored) == found["trained"]
    with pytest.raises(SequenceParallelError, match=r"module.model.save_pretrained\(folder\)"):
        export_checkpoint(case["checkpoint"], tmp_path / "model.pt", prefix="model.")
    module = ranks.Tuned.load_from_checkpoint(case["checkpoint"], place="__init__", **built)
    module.model.save_pretrained(tmp_path / "adapters")
    loaded = ranks.plain(base, str(tmp_path / "adapters"))
    for name, weight in found["weights"].items():
        value = loaded.get(name.removeprefix("model."))
        assert value is None or max_error(value.double(), weight) < 1e-6, name
    assert set(loaded) == {name.removeprefix("model.") for name in module.state_dict()}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("prefix", "PrefixTuningConfig with 3 virtual tokens, which are keys and values of each layer and no part of the sequence"),
        ("prompt, classes", "PromptTuningConfig with 4 virtual tokens in a PeftModelForSequenceClassification"),
    ],
)  # fmt: skip
def test_virtual_tokens_that_stand_elsewhere_are_refused_by_name(pools, base, kind, said):
    case = dict(kind=kind, place="__init__", folder=base, strategy={**RING, "global_view": False}, world=2)
    for (answer,) in pools(2).run(ranks.runs, [case]):
        assert f"model has PEFT's {said}" in answer["error"], answer
        assert "LoRA" in answer["error"]


def test_keys_and_values_before_each_layers_train_in_the_global_view(pools, base):
    case = dict(kind="prefix", place="__init__", folder=base)
    (expected,) = pools(1).run(ranks.runs, [dict(strategy=None, world=1, **case)])[0]
    for (actual,) in pools(2).run(ranks.runs, [dict(strategy=RING, world=2, **case)]):
        same(actual, expected, case)


@pytest.mark.parametrize("kind", ["prompt", "prompt by a network"])
def test_virtual_tokens_train_and_are_saved_as_on_one_device(pools, base, tmp_path, kind):
    hold_virtual_tokens(pools, base, tmp_path, kind, RING if kind == "prompt" else ULYSSES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prompt", "prompt by a network"])
def test_virtual_tokens_in_the_other_layout(pools, base, tmp_path, kind):
    hold_virtual_tokens(pools, base, tmp_path, kind, ULYSSES if kind == "prompt" else RING)


def hold_virtual_tokens(pools, base, tmp_path, kind, strategy):
    case = dict(kind=kind, place="__init__", folder=base)
    alone, saved = str(tmp_path / "alone"), str(tmp_path / "saved")
    (expected,) = pools(1).run(ranks.runs, [dict(strategy=None, world=1, saved=alone, **case)])[0]
    strategy = {**strategy, "global_view": False}  # a part has its virtual tokens
    for (actual,) in pools(2).run(ranks.runs, [dict(strategy=strategy, world=2, saved=saved, **case)]):
        same(actual, expected, case)
    found, wanted = (load_file(f"{folder}/adapter_model.safetensors") for folder in (saved, alone))
    assert set(found) == set(wanted) == {"prompt_embeddings"}
    assert max_error(found["prompt_embeddings"], wanted["prompt_embeddings"]) < 1e-10


@pytest.mark.parametrize(
    ("library", "kind", "strategy"),
    [
        ("bitsandbytes", "lora, 4-bit", ULYSSES),
        *slow(("bitsandbytes", "lora, 4-bit, in evaluation", RING), ("torchao", "lora, 8-bit", RING)),
    ],
)
# transformers' own, of its attribute; PEFT's, of its dispatch.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_adapters_on_a_quantized_base_train_as_on_one_device(pools, wide_base, library, kind, strategy):
    """Float32: bitsandbytes computes no wider. In evaluation, on CPUs, it packs weights anew in their forward."""
    pytest.importorskip(library)
    case = dict(kind=kind, place="configure_model", folder=wide_base, precision="32-true")
    (expected,) = pools(1).run(ranks.runs, [dict(strategy=None, world=1, **case)])[0]
    assert not expected["error"], expected["error"]
    assert any("lora" in name for name in expected["trained"])
    for (actual,) in pools(2).run(ranks.runs, [dict(strategy=strategy, world=2, **case)]):
        assert not actual["error"], actual["error"]
        assert actual["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        for name, weight in expected["weights"].items():
            assert max_error(actual["first"][name], expected["first"][name]) == 0, name
            assert max_error(actual["weights"][name], weight) < 5e-6, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_adapters_on_a_quantized_base_are_resumed(pools, wide_base, tmp_path):
    pytest.importorskip("bitsandbytes")
    case = dict(kind="lora, 4-bit", world=2, strategy=RING, precision="32-true", max_epochs=2)
    saved = str(tmp_path / "saved")
    first = pools(2).run(ranks.runs, [dict(folder=wide_base, checkpoint=saved, max_steps=1, **case)])
    resumed = pools(2).run(ranks.runs, [dict(folder=wide_base, resume=saved, **case)])
    for (before,), (after,) in zip(first, resumed, strict=True):
        assert not before["error"], before["error"]
        assert not after["error"], after["error"]
        for name, weight in before["weights"].items():
            assert max_error(after["first"][name], weight) == 0, name
        assert any(max_error(after["weights"][name], weight) > 0 for name, weight in before["weights"].items())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized_weights_that_differ_between_ranks_are_refused(pools, base):
    pytest.importorskip("bitsandbytes")
    case = dict(kind="lora, 4-bit, another rank's", place="__init__", folder=base, strategy=RING, world=2)
    for (answer,) in pools(2).run(ranks.runs, [dict(precision="32-true", **case)]):
        assert "quantized weights are not the same on all ranks (" in answer["error"], answer
        assert "from_pretrained" in answer["error"]


def test_parameters_that_are_no_plain_tensors_are_refused_by_name(pools, base):
    case = dict(kind="unknown", place="__init__", folder=base, strategy=RING, world=2)
    for (answer,) in pools(2).run(ranks.runs, [case]):
        assert "model.lm_head.weight is a tests.trainer.pretrained.tuned_ranks.Unknown" in answer["error"], answer
        assert "bitsandbytes" in answer["error"]
