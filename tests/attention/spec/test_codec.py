"""The codec carries every field: one that it forgot would drop a mask, a change of the scores or an option without a word."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from lightning_sp.attention.spec.codec import AttentionSpec, decode, encode
from lightning_sp.attention.spec.dropout import AttentionDropout
from lightning_sp.attention.spec.mask import AttentionMask
from lightning_sp.attention.spec.score_mod import MaskMod, ScoreMod
from lightning_sp.attention.spec.scores import Scores
from lightning_sp.config import AttentionOptions

DOCUMENTS = torch.tensor([[0, 3, 8]])
RUNS = torch.tensor([[[1, 2]]])
# For each field values that no default is, together with what they need beside them.
MASKS = {
    "causal": dict(causal=False),
    "boundaries": dict(boundaries=DOCUMENTS),
    "window_size": dict(window_size=(3, 2), causal=False),
    "chunk_size": dict(chunk_size=5),
    "valid": dict(valid=torch.tensor([[1, 7]])),
    "bidirectional": dict(bidirectional=RUNS),
    "key_boundaries": dict(boundaries=DOCUMENTS, key_boundaries=torch.tensor([[0, 2, 6]]), causal=False),
}
SCORES = {
    "softcap": dict(softcap=2.0),
    "bias": dict(bias=torch.ones(1, 1, 8, 8)),
    "score_mod": dict(score_mod=ScoreMod(lambda score, b, h, q, k: score * 2)),
    "tensors": dict(score_mod=ScoreMod(lambda score, b, h, q, k: score * 2), tensors=(torch.ones(3),)),
    "dense": dict(dense=torch.ones(1, 1, 8, 8, dtype=torch.bool)),
    "mask_mod": dict(mask_mod=MaskMod(lambda b, h, q, k: q >= k)),
    "dropout": dict(dropout=AttentionDropout(0.3, seed=5, call=7, samples=torch.tensor([1, 2]))),
}
OPTIONS = {
    "kernel": dict(kernel="torch"),
    "ring_transport": dict(ring_transport="network"),
    "ring_saves_kv": dict(ring_saves_kv=True),
    "ring_method": dict(ring_method="hops"),
    "ulysses_stages": dict(ulysses_stages=3),
}


def test_every_field_is_among_these():
    # A mask's matrix and its function are among what changes the scores.
    assert {f.name for f in fields(AttentionMask) if f.init} == {*MASKS, "dense", "mask_mod"}
    assert {f.name for f in fields(Scores) if f.init} == set(SCORES)
    assert {f.name for f in fields(AttentionOptions)} == set(OPTIONS)
    whole = {"mask", "layout_table", "scores", "sinks", "scale", "options", "ring_group", "ulysses_group"}
    assert {f.name for f in fields(AttentionSpec)} == whole


@pytest.mark.parametrize(
    ("kind", "name", "given"),
    [
        (kind, name, given)
        for kind, cases in ((AttentionMask, MASKS), (Scores, SCORES), (AttentionOptions, OPTIONS))
        for name, given in cases.items()
    ],
)
def test_it_comes_back_as_it_was(kind, name, given):
    parts = {AttentionMask: AttentionMask(), Scores: Scores(), AttentionOptions: AttentionOptions()}
    made, default = kind(**given), getattr(parts[kind], name)
    parts[kind] = made
    spec = AttentionSpec(
        mask=parts[AttentionMask], scores=parts[Scores], options=parts[AttentionOptions], scale=0.5, ring_group="ring", ulysses_group="heads",
        layout_table=torch.tensor([[0, 4]]), sinks=torch.ones(4),
    )  # fmt: skip
    code = encode(spec)
    found = decode(code)
    # Inductor writes it into a comment of the code that it makes for a GPU: what follows a newline would be code.
    assert "\n" not in code.options
    of_kind = {AttentionMask: found.mask, Scores: found.scores, AttentionOptions: found.options}[kind]
    value = getattr(of_kind, name)
    assert not same(value, default), "the case shows nothing"
    assert same(value, getattr(made, name))
    assert (found.scale, found.ring_group, found.ulysses_group) == (0.5, "ring", "heads")
    assert same(found.layout_table, spec.layout_table)
    assert same(found.sinks, spec.sinks)


def same(a, b):
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, AttentionDropout) and isinstance(b, AttentionDropout):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(AttentionDropout))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a is b or a == b
