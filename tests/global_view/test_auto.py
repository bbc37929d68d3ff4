"""`global_view="auto"`, the default: what a rank's part alone refuses is tried in the global view, by the preflight."""

from __future__ import annotations

import pytest

from tests.global_view import auto_ranks as ranks

RING = dict(ring_size=2)


def same(pools, loss, kinds, options=RING):
    """Return what two ranks saw, after comparing it with one device."""
    [plain] = pools(1).run(ranks.run, loss, kinds, 1, {})
    found, other = pools(2).run(ranks.run, loss, kinds, 2, options)
    assert found["error"] == other["error"] == ""
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-10)
    for name, weight in plain["weights"].items():
        assert float((found["weights"][name] - weight).abs().max()) < 1e-9, name
    assert found["logged"] == pytest.approx(plain["logged"], rel=1e-10)
    for one, another in zip(found["predictions"], plain["predictions"], strict=True):
        assert one == pytest.approx(another, rel=1e-9, abs=1e-12)
    return found


@pytest.mark.parametrize(
    ("loss", "kinds"),
    [
        ("mean_pooled", ("turns",)),  # the first batch is handed over again, and its hooks change it again
        ("shifted_logits", ("tuple",)),  # one that is not replaced in place
        # Refused in the middle of a block, which FSDP2 has gathered.
        pytest.param("shifted_logits", ("insisting",), marks=pytest.mark.slow),
        # Refused by the sanity check, before a step of training.
        pytest.param("mean_pooled", ("validation",), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_a_part_refuses_trains_as_on_one_device(pools, loss, kinds):
    found = same(pools, loss, kinds)
    # Each kind of step by itself: what one refuses another may carry.
    kinds_tried = ["validation", "training", "predict"] if "validation" in kinds else ["training"]
    assert [line.split()[1] for line in found["tried"]] == [f"{kind}_step" for kind in kinds_tried]
    assert found["shapes"] == [(4, ranks.LENGTH)] * 2
    if "tuple" not in kinds:
        assert found["shown"] == [(4, ranks.LENGTH)] * 2  # by hooks behind the first step, too


@pytest.mark.slow
def test_a_validation_that_is_refused_changes_its_own_view_alone(pools):
    [plain] = pools(1).run(ranks.late, 1, {})
    found, _ = pools(2).run(ranks.late, 2, RING)
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-10)
    assert found["logged"] == pytest.approx(plain["logged"], rel=1e-10)
    assert [line.split()[1] for line in found["tried"]] == ["validation_step"]
    assert found["shapes"] == {(4, ranks.LENGTH // 2 + 2)}  # training goes on as on a part


def test_what_is_refused_in_both_views_says_both_reasons(pools):
    found, other = pools(2).run(ranks.run, "sorted", (), 2, RING)
    assert found["error"] == other["error"]
    first, second = found["error"].splitlines()[0], found["error"].partition("The global view was tried")[2]
    assert "0 attention calls" in first
    assert "as_strided of" in second


def test_declared_documents_are_not_attended_across(pools):
    """Attention that is written out knows of no documents, whatever the user has declared."""
    found, _ = pools(2).run(ranks.run, "shifted_logits", ("packed",), 2, {**RING, "packed_documents": True})
    assert (
        "packed documents with attention that is written out"
        in found["error"].partition("The global view was tried")[2]
    )


@pytest.mark.parametrize("option", [dict(preflight=False), dict(global_view=False)], ids=str)
def test_without_a_judge_or_by_request_it_is_not_tried(pools, option):
    found, other = pools(2).run(ranks.run, "mean_pooled", (), 2, {**RING, **option})
    assert found["tried"] == other["tried"] == []
    assert "a pooled head sees only this rank's" in found["error"] or "0 attention calls" in found["error"]
