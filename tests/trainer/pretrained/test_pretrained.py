"""Weights read or drawn by Hugging Face are rank 0's on every rank, wherever the user builds the model."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.trainer.pretrained import pretrained_ranks as ranks

PLACES = ("__init__", "setup", "configure_model")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny checkpoints on disk, one with a tied head."""
    found = {name: str(tmp_path_factory.mktemp(name)) for name in ("untied", "tied")}
    for name, folder in found.items():
        ranks.save_pretrained(folder, name == "tied")
    return found


# Ways and places together once more.
MORE = [
    ("from_config", "setup", "untied"),
    ("from_config", "configure_model", "untied"),
    ("from_pretrained", "configure_model", "tied"),
]


def cases_of(folders, more=False):
    built = [("from_pretrained", place, "untied") for place in PLACES]
    built += [("from_config", "__init__", "untied"), ("from_pretrained", "__init__", "tied")]
    built += [(kind, "configure_model", "untied") for kind in ("our config", "attribute", "bfloat16")]
    built += [("load_state_dict", "configure_model", "tied")]
    built = MORE if more else built
    return [
        dict(kind=kind, place=place, folder=folders[name], precision="32-true" if kind == "bfloat16" else "64-true")
        for kind, place, name in built
    ]


def test_weights_are_rank_0s_wherever_the_model_is_built(pools, folders):
    hold(pools, cases_of(folders))


@pytest.mark.slow
def test_weights_are_rank_0s_in_more_places(pools, folders):
    hold(pools, cases_of(folders, more=True))


def hold(pools, cases):
    alone = pools(1).run(ranks.runs, [dict(strategy=None, world=1, **case) for case in cases])[0]
    # The preflight tries a model of each way that is built in configure_model; where it is built, no step asks.
    tried = [case["place"] == "configure_model" for case in cases]
    split = [
        dict(strategy=dict(ring_size=2, preflight=on), world=2, **case) for on, case in zip(tried, cases, strict=True)
    ]
    of_ranks = pools(2).run(ranks.runs, split)
    for rank, answers in enumerate(of_ranks):
        for case, actual, expected in zip(cases, answers, alone, strict=True):
            assert not actual["error"], (case, actual["error"])
            assert set(actual["weights"]) == set(expected["weights"]), case
            assert actual["dtypes"] == expected["dtypes"], case
            for name, first in expected["first"].items():
                assert max_error(actual["first"][name], first) == 0, (case, name)
            assert len(actual["told"]) == (rank == 0 and case["place"] != "configure_model"), case
            if case["kind"] == "bfloat16":
                continue  # it is rounded to 8 bits, in another order
            assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-10), case
            for name, weight in expected["weights"].items():
                assert max_error(actual["weights"][name], weight) < 1e-10, (case, name)
