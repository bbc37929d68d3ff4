"""torch.compile through the Trainer, with Inductor: `make compile`. Slow: C++ is compiled on every rank."""

from __future__ import annotations

import pytest

from lightning_sp.testing import max_error
from tests.global_view import compiled_ranks, training_ranks
from tests.trainer import scenarios

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_documents_that_change_from_batch_to_batch_are_not_compiled_for_each(pools):
    data = dict(size=12, documents=(17, 6, 5, 3, 1))
    common = dict(model="llama", data=data, micro=1)
    expected = pools(1).run(scenarios.fits, [dict(world=1, strategy={}, **common)])[0][0]
    strategy = dict(ring_size=2, balance="documents", compile=True)
    for answers in pools(2).run(scenarios.compiled_fits, [dict(world=2, strategy=strategy, **common)]):
        assert answers[0]["losses"] == pytest.approx(expected["losses"], abs=1e-10)
        assert len(set(answers[0]["layouts"])) == 5
        # Once as they are, once with the numbers of documents and ranges left open.
        assert 1 <= answers[0]["graphs"] <= 2
        assert answers[0]["graph_breaks"] == {}


@pytest.mark.parametrize("model", ["llama", "gpt", "hugging face"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_a_compiled_fit_is_the_eager_fit_of_one_process(pools, model, checkpointing):
    data = dict(size=6, packed=model != "gpt")
    expected = pools(1).run(scenarios.fits, [dict(model=model, world=1, strategy={}, data=data)])[0][0]
    layouts = [dict(ring_size=2), dict(ulysses_size=2)]
    common = dict(compile=True, activation_checkpointing=checkpointing)
    cases = [dict(model=model, world=2, strategy={**layout, **common}, data=data) for layout in layouts]
    for answers in pools(2).run(scenarios.compiled_fits, cases):
        for answer, layout in zip(answers, layouts, strict=True):
            # Inductor fuses sums in another order than eager kernels do; transformers' norms are float32 inside, whatever the model is.
            allowed = 1e-7 if model == "hugging face" else 1e-10
            assert answer["losses"] == pytest.approx(expected["losses"], abs=allowed), layout
            for step, one in zip(answer["grads"], expected["grads"], strict=True):
                for name in one:
                    assert max_error(step[name], one[name]) < allowed, (layout, name)
            assert answer["graphs"] > 0, "nothing was compiled"
            assert answer["graph_breaks"] == {}, layout


def test_a_block_with_attention_by_hand_compiled_in_the_global_view_trains_as_on_one_device(pools):
    [expected] = pools(1).run(training_ranks.one_process, "input_and_target", 29)
    options = dict(ring_size=2, preflight=False)
    for [found] in pools(2).run(compiled_ranks.fits, ["input_and_target"], 29, 2, options, "inductor"):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        for name, weight in expected["weights"].items():
            assert float((found["weights"][name] - weight).abs().max()) < 1e-9, name
        assert found["graphs"] > 0, "nothing was compiled"
        assert (found["breaks"], found["notes"]) == ({}, [])
