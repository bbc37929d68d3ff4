"""Hugging Face's heads and their own losses are one device's: of tokens, of rows, of answers, of experts."""

from __future__ import annotations

import pytest
import torch

from lightning_sp.testing import max_error
from tests.rewrite.hugging_face.heads import heads_ranks as ranks

LAYOUTS = {
    "2 x 1": (2, dict(data_parallel_size=2, sequence_parallel_size=1)),
    "1 x 2": (2, dict(ring_size=2)),
    "2 x 2": (4, dict(data_parallel_size=2, ulysses_size=2, preflight=False)),
}
# Four ranks run one model of each loss; two ranks run all, with the preflight.
OF_EACH_LOSS = ("modernbert masked", "llama tokens", "gpt2 sequence", "llama regression", "bert answers", "mixtral")


@pytest.fixture(scope="module")
def one_device():
    torch.set_num_threads(1)
    return {name: ranks.fit(name, None) for name in ranks.MODELS}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_models_own_loss_is_that_of_one_device(pools, one_device, layout):
    hold(pools, one_device, layout, list(OF_EACH_LOSS if layout == "2 x 2" else ranks.MODELS))


@pytest.mark.slow
def test_every_models_own_loss_on_four_ranks(pools, one_device):
    hold(pools, one_device, "2 x 2", [name for name in ranks.MODELS if name not in OF_EACH_LOSS])


def hold(pools, one_device, layout, names):
    world, strategy = LAYOUTS[layout]
    by_rank = pools(world).run(ranks.fits, names, strategy, world)
    for name in names:
        wanted = one_device[name]
        answers = [answers[name] for answers in by_rank]
        assert not any(answer["error"] for answer in answers), (name, answers[0]["error"])
        # transformers computes losses in float32. A mean of squares is each group's own, as in DDP.
        losses = [sum(each) / world for each in zip(*(answer["losses"] for answer in answers), strict=True)]
        assert losses == pytest.approx(wanted["losses"], rel=1e-6), name
        for answer in answers:
            errors = {n: max_error(answer["weights"][n], weight) for n, weight in wanted["weights"].items()}
            assert max(errors.values()) < 1e-6, (name, errors)
        if "sequence" in name and layout != "2 x 2":
            # What the model returns for a row is whole too.
            rows = torch.cat([answer["output"] for answer in answers]) if layout == "2 x 1" else answers[0]["output"]
            assert max_error(rows, wanted["output"]) < 1e-6, name
