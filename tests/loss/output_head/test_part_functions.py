"""A loss of a head whose words are split over ranks is that of the whole head, in value and every gradient: float64, 1e-12."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.loss.output_head import part_functions_ranks

SIZES = [2, pytest.param(4, marks=pytest.mark.slow)]


def hold(pools: Any, size: int, run: Any) -> None:
    for found in pools(size).run(run):
        assert found
        for name, error in found.items():
            assert error < 1e-12, name


@pytest.mark.parametrize("size", SIZES)
def test_every_answer_is_that_of_whole_logits(pools: Any, size: int) -> None:
    hold(pools, size, part_functions_ranks.asked)


@pytest.mark.parametrize("size", SIZES)
def test_losses_of_all_kinds_are_those_of_whole_logits(pools: Any, size: int) -> None:
    """Smoothed, weighted, of probabilities, with ignored targets, behind a softcap; frozen weights and hidden states."""
    hold(pools, size, part_functions_ranks.losses)


def test_logits_that_are_written_to_are_whole(pools: Any) -> None:
    hold(pools, 2, part_functions_ranks.written)


def softcap(logits: torch.Tensor) -> torch.Tensor:
    return 3 * torch.tanh(logits / 3)


def centred(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.mean(-1, keepdim=True).detach() * logits.max(-1, keepdim=True).values


@pytest.mark.parametrize(("transform", "gathers"), [(None, False), (softcap, False), (centred, True)])
def test_the_public_function_gathers_logits_for_what_it_does_not_know_alone(
    pools: Any, transform: Any, gathers: bool
) -> None:
    for error, gathered in pools(2).run(part_functions_ranks.by_the_public_function, transform):
        assert error < 1e-12
        assert gathered is gathers


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}])
def test_no_rank_has_whole_logits_or_a_whole_heads_gradient(pools: Any, options: dict[str, Any]) -> None:
    tokens, width, words = 512, 32, 4096
    for found in pools(2).run(part_functions_ranks.most_bytes, tokens, width, words, options):
        # The gradients of its own words and a chunk's logits of them; those of hidden states are whole.
        assert found["split"] < 0.54 * found["whole"]
        assert found["split"] < 4 * tokens * words / 4
