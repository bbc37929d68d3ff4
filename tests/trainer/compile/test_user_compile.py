"""A model that its user compiled, whole or in blocks, trains as on one device, from rank 0's weights and under its own names."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from lightning_sp import export_checkpoint
from lightning_sp.testing import max_error
from tests.trainer.compile import compile_ranks as ranks

RING, ULYSSES = dict(ring_size=2), dict(ulysses_size=2)
ONE = "gpt of one layer"
# The preflight tries a GPT compiled whole and a Llama of compiled blocks: it compiles each again, for its crops.
CASES = [
    dict(model=ONE, how="torch.compile(model)", strategy=dict(**RING, preflight=False)),
    # compile=True finds nothing left to compile, so that no Inductor is started.
    dict(model=ONE, how="torch.compile(model)", strategy=dict(**ULYSSES, compile=True), early=True),
    dict(model=ONE, how="torch.compile(model)", strategy=dict(**RING, preflight=False), before=True),
    dict(
        model="hugging face",
        how="model.compile()",
        strategy=dict(**RING, activation_checkpointing=True, preflight=False),
    ),
    dict(
        model="gpt",
        how="block.compile()",
        strategy=dict(**ULYSSES, compile=True, activation_checkpointing="matmuls", preflight=False),
    ),
    dict(
        model="hugging face",
        how="torch.compile(block)",
        strategy=dict(**ULYSSES, activation_checkpointing=True),
        early=True,
    ),
]

# In the global view compiled code runs as it is written.
WHOLE = [
    dict(model="gpt", how="torch.compile(model)", strategy=dict(**RING, global_view=True)),
    dict(model="gpt", how="block.compile()", strategy=dict(**ULYSSES, global_view=True, preflight=False)),
    dict(
        model="hugging face",
        how="torch.compile(block)",
        strategy=dict(**RING, global_view=True, activation_checkpointing=True),
    ),
]
FUNCTION = [dict(model=ONE, how="torch.compile(function)", strategy=dict(**RING, global_view=True, preflight=False))]


@pytest.fixture(scope="module")
def eager(pools):
    """What plain Lightning makes of the same models, uncompiled, from rank 0's seed; of each when it is asked for."""

    @cache
    def of(model, early=False, before=False):
        case = dict(model=model, how="", world=1, strategy=None, early=early, before=before)
        return pools(1).run(ranks.fits, [case])[0][0]

    return of


def same(actual, expected, case):
    assert not actual["error"], (case, actual["error"])
    assert set(actual["weights"]) == set(expected["weights"]), case
    assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-10), case
    for name, weight in expected["weights"].items():
        assert max_error(actual["first"][name], expected["first"][name]) == 0, (case, name)
        assert max_error(actual["weights"][name], weight) < 1e-10, (case, name)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES[2:4], id="few"),
        pytest.param(CASES, id="all", marks=pytest.mark.slow),
        pytest.param(WHOLE, id="global view", marks=pytest.mark.slow),
        pytest.param(FUNCTION, id="a function in the global view"),
    ],
)
def test_a_compiled_model_trains_as_the_eager_one_of_one_device(pools, eager, cases):
    for answers in pools(2).run(ranks.fits, [dict(world=2, **case) for case in cases]):
        for case, actual in zip(cases, answers, strict=True):
            same(actual, eager(case["model"], case.get("early", False), case.get("before", False)), case)
            assert (actual["graphs"] > 0) == (cases not in (WHOLE, FUNCTION)), (
                "nothing was compiled, or in the global view",
                case,
            )


def test_checkpoints_have_the_models_own_names(pools, eager, tmp_path):
    """Ours is read by an uncompiled model, and plain Lightning's of a compiled model by ours."""
    strategy = dict(ring_size=2, preflight=False)
    common = dict(model=ONE, world=2)
    folder, file = str(tmp_path / "folder"), str(tmp_path / "plain.ckpt")
    pools(2).run(ranks.fit, ONE, "torch.compile(model)", 2, strategy, False, False, folder)
    (compiled,) = {
        answer["losses"][0]
        for answer in pools(1).run(ranks.fit, ONE, "torch.compile(model)", 1, None, False, False, file)
    }
    assert compiled == pytest.approx(eager(ONE)["losses"][0], abs=1e-10)
    assert any("_orig_mod." in name for name in torch.load(file, weights_only=True)["state_dict"])
    exported = torch.load(export_checkpoint(folder, tmp_path / "model.pt"), weights_only=True)
    assert set(exported) == set(eager(ONE)["weights"])
    again = [
        dict(how="", strategy=strategy, resume=folder, max_epochs=2, **common),
        dict(how="torch.compile(model)", strategy=strategy, resume=file, max_epochs=2, **common),
    ]
    for answers in pools(2).run(ranks.fits, again):
        for answer, case in zip(answers, again, strict=True):
            assert not answer["error"], answer["error"]
            for name, weight in eager(ONE)["weights"].items():
                assert max_error(answer["first"][name], weight) < 1e-10, (case, name)


def test_ranks_that_build_other_models_than_rank_0_are_refused_with_the_names(pools):
    for kind, words in {
        "name": "18 parameters and buffers 1 are only here (model.extra); build",
        "shape": "1 differ (of model.head.weight shape, dtype and requires_grad are ((61, 30)",
        "order": "the order differs, in which messages are told apart: model.positions.weight where rank 0 has model.embedding.weight",
        "dropout": "buffers none differ, but model.dropout is Dropout(p=0.5, inplace=False), on rank 0 Dropout(p=0.0, inplace=False); build",
        "frozen": "requires_grad are ((61, 32), torch.float64, False), on rank 0 ((61, 32), torch.float64, True)",
    }.items():
        for message in pools(2).run(ranks.other_models, kind):
            assert message.startswith("SequenceParallelError: rank 1: this rank has built another model"), message
            assert words in message
