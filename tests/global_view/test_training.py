"""Unmodified modules and losses that look along the sequence: trained in the global view as on one device."""

from __future__ import annotations

from functools import cache

import pytest

from tests.global_view import training_ranks as ranks
from tests.global_view.models.layers import LAYERS
from tests.global_view.models.modules import LOSSES

LENGTH = 29  # padded to 30 or 32
# Of the losses, what each layout tries in the default run.
FEW = ("input_and_target", "mean_pooled", "dpo", "smoothness", "chosen_sums", "Buckets")
# Made of the same functions as others, or of those that Ulysses tries: the slow run has them.
VARIANTS = (
    "z_loss", "last_pooled", "first_pooled", "ipo", "grpo", "regression", "masked_mean", "OfOneKey", "Alibi", "Capped", "Cosine", "TokenShift",
    "mean_pooled", "dpo", "smoothness", "chosen_sums", "Buckets", "Grouped", "Squeeze", "shifted_logits", "multi_token", "adversarial", "Window",
)  # fmt: skip
MOST = [name for name in (*LOSSES, *LAYERS) if name not in VARIANTS]


@pytest.fixture(scope="module")
def expected(pools):
    """What one device gives, by loss."""

    @cache
    def of(loss):
        [found] = pools(1).run(ranks.one_process, loss, LENGTH)
        return found

    return of


@pytest.mark.parametrize(
    ("world", "options", "losses"),
    [
        (2, dict(ring_size=2), MOST),
        pytest.param(2, dict(ulysses_size=2), [*LOSSES, *LAYERS], marks=pytest.mark.slow),
        (2, dict(ulysses_size=2), FEW[1:]),
        pytest.param(4, dict(ulysses_size=2, ring_size=2), [*LOSSES, *LAYERS], marks=pytest.mark.slow),
        pytest.param(4, dict(ulysses_size=2, data_parallel_size=2), FEW[:1], marks=pytest.mark.slow),
        pytest.param(2, dict(ring_size=2), VARIANTS, marks=pytest.mark.slow),
    ],
)
def test_weights_and_losses_are_those_of_one_device(pools, expected, world, options, losses):
    [answers, *_] = pools(world).run(ranks.in_global_view, list(losses), LENGTH, world, options)
    for loss, found in zip(losses, answers, strict=True):
        assert not isinstance(found, str), (loss, found)
        assert found["losses"] == pytest.approx(expected(loss)["losses"], rel=1e-10), loss
        for name, weight in expected(loss)["weights"].items():
            assert float((found["weights"][name] - weight).abs().max()) < 1e-9, (loss, name)


def test_whole_numbers_are_drawn_alike_and_those_of_tokens_are_not(pools):
    first, second = pools(2).run(ranks.draws, LENGTH)
    assert [whole for whole, _ in first] == [whole for whole, _ in second]
    assert len({str(whole) for whole, _ in first}) == len(first)
    for (_, own), (_, other) in zip(first, second, strict=True):
        assert own != other
