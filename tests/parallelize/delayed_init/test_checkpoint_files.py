"""What `from_pretrained` gives within `configure_model`, one tensor at a time, is what it gives without, to the bit."""

from __future__ import annotations

import logging
import os
import sys
import warnings

import pytest
import torch
from lightning_utilities.core import rank_zero as rank_zero_module
from torch import nn

from lightning_sp import SequenceParallelError
from lightning_sp.parallelize import DelayedWeights, MetaDevice, recorded
from tests.parallelize.delayed_init import reading


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """transformers reports what is missing as a warning of its logger, and draws bars; what is said is rank 0's."""
    monkeypatch.setattr(rank_zero_module.rank_zero_only, "rank", 0, raising=False)
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.mark.parametrize("name", reading.READ)
def test_what_is_read_is_what_transformers_reads(name, tmp_path, caplog):
    reading.write(name, tmp_path)
    torch.manual_seed(4)
    expected, then = reading.read(name, tmp_path), torch.rand(3)
    torch.manual_seed(4)
    root = nn.Module()
    # Tests before may have left Lightning's loggers to errors alone.
    with caplog.at_level(logging.INFO, rank_zero_module.log.name), recorded(root, draws=True):
        root.model = reading.read(name, tmp_path)
    assert torch.equal(torch.rand(3), then)
    whole = [each for each in caplog.messages if "each rank reads the whole of" in each]
    weights, actual = DelayedWeights.of(root), tensors_of(root.model)
    assert weights.refusal is None
    assert actual.keys() == tensors_of(expected).keys()
    parameters = {name for name, _ in root.named_parameters()}
    if name == "pickle":
        assert len(whole) == 1
        assert whole[0].endswith("until it is sharded: pytorch_model.bin is no safetensors file")
        assert not weights.names
    else:
        assert not whole
        read = {each for each in parameters if not name.startswith("parts missing") or "layers.1.mlp" not in each}
        resized = {"model.model.embed_tokens.weight"} if name == "tied" else set()
        drawn = {"model.score.weight"} if name == "another head" else set()
        assert weights.names >= read - resized - drawn, "nothing that a file holds is in memory"
    for key, value in tensors_of(expected).items():
        own = weights.take(f"model.{key}") if f"model.{key}" in weights.names else actual[key]
        assert (own.dtype, own.shape, actual[key].requires_grad) == (value.dtype, value.shape, value.requires_grad), key
        assert torch.equal(own.detach(), value.detach()), key
    ties = dict(expected.named_parameters(remove_duplicate=False)).keys() - dict(expected.named_parameters()).keys()
    of_root = (
        dict(root.model.named_parameters(remove_duplicate=False)).keys() - dict(root.model.named_parameters()).keys()
    )
    assert ties == of_root


@pytest.mark.parametrize("name", reading.READ)
def test_other_ranks_have_the_same_names_and_no_memory(name, tmp_path):
    reading.write(name, tmp_path)
    expected, root = tensors_of(reading.read(name, tmp_path)), nn.Module()
    with recorded(root, draws=False), MetaDevice():
        root.model = reading.read(name, tmp_path)
    actual = tensors_of(root.model)
    assert DelayedWeights.of(root).refusal is None
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        own = actual[key]
        assert (own.dtype, own.shape, own.requires_grad) == (value.dtype, value.shape, value.requires_grad), key
    if name not in ("pickle", "tied", "parts missing", "another head"):
        assert all(each.is_meta for each in root.model.parameters())


def test_transformers_has_its_own_method_and_threads_afterwards(tmp_path):
    from transformers import PreTrainedModel

    reading.write("one file", tmp_path)
    own = vars(PreTrainedModel)["_load_pretrained_model"]
    root = nn.Module()
    with recorded(root, draws=True):
        root.model = reading.read("one file", tmp_path)
        assert vars(PreTrainedModel)["_load_pretrained_model"] is not own
    assert vars(PreTrainedModel)["_load_pretrained_model"] is own
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ
    with pytest.raises(ZeroDivisionError), recorded(nn.Module(), draws=True):
        nn.Linear(2, 1 // int(torch.zeros(1)))
    assert vars(PreTrainedModel)["_load_pretrained_model"] is own


def test_transformers_may_be_imported_while_the_model_is_built(tmp_path, monkeypatch):
    import transformers

    reading.write("one file", tmp_path)
    root, modeling = nn.Module(), sys.modules["transformers.modeling_utils"]
    own = vars(transformers.PreTrainedModel)["_load_pretrained_model"]
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    with recorded(root, draws=True):
        torch.ones(1)
        assert vars(transformers.PreTrainedModel)["_load_pretrained_model"] is own
        monkeypatch.setitem(sys.modules, "transformers.modeling_utils", modeling)
        root.model = reading.read("one file", tmp_path)
    assert len(DelayedWeights.of(root).names) == len(list(root.parameters()))


def test_a_file_that_ends_early_is_refused(tmp_path):
    reading.write("one file", tmp_path)
    file, root = tmp_path / reading.FILE, nn.Module()
    with recorded(root, draws=True):
        root.model = reading.read("one file", tmp_path)
    weights = DelayedWeights.of(root)
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(SequenceParallelError, match=r"ends within a tensor \(.*\) of F32: \d+ of \d+ bytes are there"):
        [weights.take(name) for name in list(weights.names)]
