"""A mask function is known by its code, whatever name the copy in a compiled graph goes by."""

from __future__ import annotations

from types import FunctionType

import torch
from transformers import masking_utils

from lightning_sp.rewrite.hugging_face.mask_names import mask_name


def test_a_copy_without_its_full_name_is_known_by_its_code():
    original = masking_utils.packed_sequence_mask_function(torch.zeros(1, 4))
    copy = FunctionType(original.__code__, {}, closure=original.__closure__)
    copy.__qualname__ = copy.__name__
    assert mask_name(copy) == mask_name(original) == "packed_sequence_mask_function.<locals>.inner_mask"


def test_a_users_own_keeps_its_name():
    def inner_mask(row, head, query, key):
        return query >= key

    assert mask_name(inner_mask) == inner_mask.__qualname__
    assert mask_name(print) == "print"
