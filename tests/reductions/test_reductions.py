"""The law for reductions: a loss made of them has one device's value and gradient, however tokens and rows are dealt."""

from __future__ import annotations

import pytest
import torch

from lightning_sp import reductions
from lightning_sp.errors import SequenceParallelError
from tests.reductions import reductions_ranks as ranks
from tests.reductions.programs import OF_BATCHES, PROGRAMS

# (ring, ulysses, balance, tokens): zigzag with padding, contiguous, a layout made for the documents, data-parallel groups of one rank.
LAYOUTS = [
    (2, 2, "zigzag", 19),
    (1, 4, "zigzag", 21),
    (2, 1, "documents", 24),
    (2, 1, "zigzag", 19),
    pytest.param(1, 1, "zigzag", 19, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("ring", "ulysses", "balance", "tokens"), LAYOUTS)
def test_law(pools, ring, ulysses, balance, tokens):
    answers = pools(4).run(ranks.law, list(PROGRAMS), ring, ulysses, balance, tokens)
    size = ring * ulysses
    for name, program in PROGRAMS.items():
        found = [answer[name] for answer in answers]
        for each in found:
            assert max(each["loss_error"], each["x_error"], each["weight_error"]) < 1e-10, (name, each)
        losses = [each["loss"] for each in found]
        groups = [losses[first : first + size] for first in range(0, 4, size)]
        assert all(len(set(group)) == 1 for group in groups), (name, losses)
        assert (len(set(losses)) == 1) == (program in OF_BATCHES or size == 4), (name, losses)


def test_in_evaluation_a_batch_is_that_of_one_group(pools):
    for errors in pools(4).run(ranks.evaluated):
        assert max(errors) < 1e-12, errors


@pytest.mark.parametrize("ring", [1, 2])
def test_rows_of_groups_with_other_numbers_of_rows(pools, ring):
    counts = [2 + group for group in range(4 // ring)]
    rows = [float(i) for count in counts for i in range(count)]
    for rank, (found, gradient) in enumerate(pools(4).run(ranks.uneven_rows, ring)):
        group = rank // ring
        assert found == rows
        start = sum(counts[:group])
        assert gradient == [float(len(counts) * (start + i)) for i in range(counts[group])]


REFUSED = {
    "unshard": r"unshard of a tensor (3, 9, 4): dim 1 must be this rank's tokens, 10 of 19",
    "shard": r"shard of a tensor (3, 9, 4): dim 1 must be the tokens of a whole sequence, 19",
    "sum": r"sequence_sum of a tensor (3, 9, 4)",
    "mask": r"a mask (3, 9) for a tensor (3, 10, 4)",
    "batch": r"must have a number for each of 3 rows, or for each token",
    "alike": r"batch_sum of a tensor (3, 10): it has as many entries as this rank has tokens, and the same numbers on all 2 ranks",
    "alike, padded": r"batch_mean(x, of='rows'), or of='tokens'",
    "of tokens": r"must have a number for each of 3 rows, or for each token of this rank",
    "positions": r"rank 2, 3: at_positions: [19] lie outside of the sequence: must be from 0 to 18",
    "rows": r"positions (2,) for 3 rows",
    "documents": r"num_documents=2, but a token is of document 18",
    "shape": r"documents (10,) for tokens (3, 10)",
}


def test_what_cannot_be_reduced_is_refused_on_all_ranks(pools):
    for said in pools(4).run(ranks.refusals):
        assert set(said) == set(REFUSED)
        for name, part in REFUSED.items():
            assert part in said[name], (name, said[name])


def test_what_has_as_many_numbers_as_tokens_counts_as_it_is_told(pools):
    each = torch.linspace(0, 1, 10, dtype=torch.float64)
    # Two groups of 3 rows; their 2 x 3 x 19 tokens without padding.
    wanted = [6 * float(each.sum()), float(each.square().mean()), 4 * float(each[:3].sum()), 57.0, 0.0]
    for found in pools(4).run(ranks.as_many_as_tokens):
        assert found == pytest.approx(wanted, abs=1e-12)


def test_on_one_device_it_is_plain_torch():
    part = ranks.whole_part(0, 19)
    x, mask = part.x, part.mask
    assert reductions.unshard(x) is x
    assert reductions.shard(x) is x
    assert reductions.gather_rows(x) is x
    torch.testing.assert_close(reductions.sequence_sum(x, mask), (x * mask[..., None]).sum(1))
    torch.testing.assert_close(reductions.sequence_mean(x), x.mean(1))
    torch.testing.assert_close(reductions.sequence_max(x), x.amax(1))
    assert torch.equal(reductions.last_token(x), x[:, -1])
    assert torch.equal(reductions.at_positions(x, 3), x[:, 3])
    torch.testing.assert_close(reductions.batch_mean(x, mask), x[mask].mean())
    torch.testing.assert_close(reductions.batch_sum(x, mask), x[mask].sum())
    assert int(reductions.batch_sum(mask)) == int(mask.sum())
    documents = reductions.document_ids(part.position_ids)
    assert documents[0].tolist() == [0] * 5 + [1] + [2] * 9 + [3] * 4
    assert reductions.sequence_mean(x, documents=documents).shape == (3, 6, 4)
    assert reductions.shift(part.labels, 1, -100)[:, :-1].equal(part.labels[:, 1:])
    assert reductions.shift(part.labels, -2, -100)[0, :3].tolist() == [-100, -100, int(part.labels[0, 0])]
    assert reductions.shift(part.labels, 40, -100).unique().tolist() == [-100]


def test_rows_without_a_token():
    x, none = torch.randn(2, 5, 3), torch.zeros(2, 5, dtype=torch.bool)
    assert not reductions.sequence_mean(x, none).any()
    assert reductions.sequence_max(x, none).eq(-torch.inf).all()
    assert not reductions.last_token(x, none).any()
    assert float(reductions.batch_mean(x, none)) == 0.0
    hidden = torch.where(none[..., None], x, torch.nan)
    assert not reductions.sequence_sum(hidden, none).any(), "what is left out may be nan"


def test_ties_share_the_gradient_as_in_torch():
    values = torch.tensor([[1.0, 3.0, 3.0], [-torch.inf, -torch.inf, -torch.inf]])
    ours, theirs = (values.clone().requires_grad_() for _ in range(2))
    reductions.sequence_max(ours).sum().backward()
    theirs.amax(1).sum().backward()
    assert torch.equal(ours.grad[0], theirs.grad[0])
    assert not ours.grad[1].any(), "what is infinite learns nothing"


def test_the_precision_of_sums():
    x = torch.ones(1, 3000, dtype=torch.bfloat16)
    assert reductions.sequence_sum(x).dtype == torch.bfloat16
    assert float(reductions.batch_sum(x)) == 3000.0
    assert reductions.batch_mean(x).dtype == torch.float32


def test_refused_on_one_device_too():
    x = torch.randn(2, 5)
    with pytest.raises(
        SequenceParallelError, match=r"at_positions: \[5\] lie outside of the sequence: must be from 0 to 4"
    ):
        reductions.at_positions(x, torch.tensor([0, 5]))
    with pytest.raises(SequenceParallelError, match=r"a mask \(2, 4\) for a tensor \(2, 5\)"):
        reductions.batch_mean(x, torch.ones(2, 4))
    with pytest.raises(SequenceParallelError, match=r"num_documents=1, but a token is of document 4"):
        reductions.sequence_sum(x, documents=torch.arange(5).expand(2, 5), num_documents=1)
