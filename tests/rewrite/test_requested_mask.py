"""A mask that a model asked for is handed on as it is, or its use is refused by name."""

import operator

import pytest
import torch
from torch.utils._pytree import tree_map

from lightning_sp.attention import AttentionMask
from lightning_sp.errors import SequenceParallelError
from lightning_sp.rewrite.hugging_face.attention import _refuse_arguments
from lightning_sp.rewrite.requested_mask import RequestedMask


@pytest.fixture
def mask():
    return RequestedMask(AttentionMask(causal=True), says_nothing=True, shape=(2, 1, 16, 16))


def test_a_cut_that_leaves_all_keys_in_changes_nothing(mask):
    for same in (mask[:], mask[:, :, :, :16], mask[..., :20], mask[:, :, -0:, : torch.tensor(16)], mask[..., 0:16]):
        assert same is mask


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda mask: mask[:, 0, :, :], "takes a part of"),
        (lambda mask: mask[..., :15], "takes a part of"),
        (lambda mask: mask[..., 1:], "takes a part of"),
        (lambda mask: mask[..., ::2], "takes a part of"),
        (lambda mask: mask.dtype, "reads `dtype` of"),
        (lambda mask: mask.masked_fill(torch.ones(1, dtype=torch.bool), 0.0), "reads `masked_fill` of"),
        (lambda mask: mask + 1, "computes with"),
        (lambda mask: 1.0 - mask, "computes with"),
        (lambda mask: mask & mask, "computes with"),
        (operator.invert, "computes with"),
        (lambda mask: mask > 0, "computes with"),
        (list, "computes with"),
        (lambda mask: torch.cat([mask, torch.zeros(1)]), "calls torch's `cat` on"),
        (lambda mask: torch.where(mask, 0.0, 1.0), "calls torch's `where` on"),
        (lambda mask: torch.ones(1).add(mask), "calls torch's `add` on"),
    ],
)
def test_a_model_that_computes_with_it_is_refused(mask, use, what):
    with pytest.raises(SequenceParallelError, match=f"the model {what} the attention mask that it asked for"):
        use(mask)


def test_a_model_within_another_sees_that_it_is_made_already(mask):
    assert (mask.ndim, tuple(mask.shape)) == (4, (2, 1, 16, 16))


def test_what_looks_for_protocols_finds_none(mask):
    assert not hasattr(mask, "__array__")
    assert tree_map(lambda leaf: leaf, {"attention_mask": (mask,)})["attention_mask"][0] is mask


def test_keys_chosen_beside_the_mask_are_refused():
    with pytest.raises(SequenceParallelError, match="Sparse uses indices: it cannot be carried yet"):
        _refuse_arguments("Sparse", {"indices": torch.zeros(1, 4, 2)})
