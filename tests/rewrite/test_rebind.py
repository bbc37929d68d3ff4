"""Names that a model's files bound to a function."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from lightning_sp.rewrite.rebind import BoundNames
from tests.rewrite import mask_models


def test_names_bound_to_a_function_are_bound_to_another_and_given_back():
    original, model = mask_models.scaled_dot_product_attention, mask_models.Imported(held=True)
    made = []

    def make(held):
        made.append(held)
        return str

    with ExitStack() as undo:
        BoundNames(model).rebind(original, make, undo)
        assert mask_models.scaled_dot_product_attention is str
        assert model.held is str
        assert torch.nn.functional.scaled_dot_product_attention is original, "torch's own modules are left alone"
    assert made[0] is original
    assert mask_models.scaled_dot_product_attention is original
    assert model.held is original
    flex, compiled = mask_models.flex_attention, mask_models.compiled_flex
    with ExitStack() as undo:
        BoundNames(model).rebind_to(flex, str, undo)
        assert mask_models.flex_attention is str
        assert mask_models.compiled_flex is str, "compiled counts too"
    assert (mask_models.flex_attention, mask_models.compiled_flex) == (flex, compiled)
