"""Embeddings and heads as units of their own: gradients are one process', each is gathered and reduced once, and less is alive at once."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_sp.parallelize import transformer_blocks
from lightning_sp.parallelize.fsdp.units.vocabulary_units import vocabulary_layers
from tests.parallelize.fsdp.units import vocabulary_units_ranks as ranks

SEPARATE = ["embedding", "head"]
UNITS = {
    "separate": SEPARATE, "chunked": SEPARATE, "recomputed": SEPARATE, "twice": SEPARATE, "parts": SEPARATE, "weight after": SEPARATE,
    "masked": ["embedding", "projection", "narrow", "head"],
    "direct": ["embedding"], "handed": ["embedding"], "tied": [],
}  # fmt: skip


@pytest.mark.parametrize("kind", UNITS)
def test_gradients_are_one_process_and_a_head_is_gathered_and_reduced_once(pools, kind):
    for worst, units, calls in pools(2).run(ranks.law, kind, (2,)):
        assert worst <= 1e-10
        assert units == UNITS[kind]
        # Twice: once more without gradients, and freed.
        assert calls["all_gather head"] == ("head" in units) * (2 if kind == "twice" else 1)
        assert calls["reduce head"] == ("head" in units)
        assert calls["all_gather embedding"] == ("embedding" in units) * (3 if kind == "twice" else 1), (
            "none is for a backward"
        )
        assert calls["reduce embedding"] == ("embedding" in units)


@pytest.mark.parametrize("kind", ["separate", "tied"])
@pytest.mark.parametrize("shape", [pytest.param((4,), marks=pytest.mark.slow), (2, 2)], ids=str)
def test_gradients_are_one_process_where_parameters_are_replicated_too(pools, kind, shape):
    assert all(worst <= 1e-10 for worst, _, _ in pools(4).run(ranks.law, kind, shape))


@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_a_weight_that_a_step_uses_without_a_call_has_one_process_gradient(pools, shape):
    assert all(worst <= 1e-10 for worst in pools(2 if shape == (2,) else 4).run(ranks.without_a_call, shape))


@pytest.mark.slow
def test_the_peak_of_a_step_falls_by_a_table(pools):
    table = 32768 * 256 * 4
    as_one, separate = (pools(2).run(ranks.peak_bytes, 32768, 256, each) for each in (False, True))
    for one, own in zip(as_one, separate, strict=True):
        assert one - own > 0.9 * table, (one, own)
        # The head whole with its gradient, or that and what is sent of it, and half of it received.
        assert own < 3.9 * table, own


class Held(nn.Module):
    """Uses of a layer, each in a forward of its own."""

    def __init__(self, forward):
        super().__init__()
        self.layer = nn.Linear(4, 64)
        self.blocks = nn.ModuleList(ranks.Block(2) for _ in range(2))
        self.forward = forward.__get__(self)


def called(self, x):
    return self.layer(x) if self.layer is not None and isinstance(self.layer, nn.Linear) else x


def asked_for_its_dtype(self, x):
    return self.layer(x.to(self.layer.weight.dtype))


def weight(self, x):
    return x @ self.layer.weight.T


def renamed(self, x):
    layer = self.layer
    return layer(x)


def by_getter(self, x):
    return x @ self.get_output_embeddings().weight.T


@pytest.mark.parametrize(
    ("use", "found"), [(called, 1), (asked_for_its_dtype, 1), (weight, 0), (renamed, 0), (by_getter, 0), (print, 0)]
)
def test_a_layer_is_a_unit_where_the_source_shows_that_it_is_called_alone(use, found):
    model = Held(use) if use is not print else Held(called)
    if use is print:
        model.forward = print  # without a source
    assert len(vocabulary_layers(nn.ModuleList([model]), model, transformer_blocks(model))) == found


class Wrapped(nn.Module):
    """A layer as an adapter holds it, whose weight is read as if it were the adapter's."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 64)

    @property
    def weight(self):
        return self.inner.weight

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize(("use", "found"), [(called, 0), (weight, 0)])
def test_a_layer_whose_weight_a_property_hands_on_is_no_unit(use, found):
    model = Held(use)
    model.layer = Wrapped()
    assert len(vocabulary_layers(nn.ModuleList([model]), model, transformer_blocks(model))) == found


def test_an_adapter_is_a_unit_with_its_layer_and_one_that_is_used_otherwise_leaves_it_in_the_models():
    for use, names in ((called, ["layer"]), (weight, [])):
        model = Held(use)
        model.layer = Wrapped()
        model.get_output_embeddings = lambda model=model: model.layer
        layers = vocabulary_layers(nn.ModuleList([model]), model, transformer_blocks(model))
        assert [name for name, each in model.named_modules() if each in layers] == names
