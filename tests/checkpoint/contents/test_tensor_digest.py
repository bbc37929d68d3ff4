"""A digest is of a tensor's bits in their order, whatever the shards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_sp.checkpoint.contents.tensor_digest import Part, combined, tensor_digest
from tests.checkpoint.contents import digest_ranks as ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(3)) * 5
    return drawn > 0 if dtype == torch.bool else drawn.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_change_changes_it(dtype):
    tensor = random_tensor(dtype, 6, 4)
    turned = ~tensor if dtype in (torch.int8, torch.bool) else -tensor
    changes = {
        "rows": tensor.flip(0),
        "columns": tensor.flip(1),
        "transposed": tensor.t().reshape(6, 4),
        "one": torch.where(torch.arange(24).view(6, 4) == 7, turned, tensor),
        "signs of two rows": tensor.index_copy(0, torch.tensor([1, 4]), turned[[1, 4]]),
        "all signs": turned,
        "a row more": torch.cat([tensor, tensor[:1]]),
    }
    digests = [tensor_digest(each) for each in (tensor, *changes.values())]
    assert len(set(digests)) == len(digests)


def test_zeros_of_either_sign_and_kinds_of_nan_differ():
    zero, nan = torch.zeros(3), torch.full((3,), torch.nan)
    assert tensor_digest(zero) != tensor_digest(-zero)
    assert tensor_digest(nan) != tensor_digest(-nan)
    assert tensor_digest(nan) == tensor_digest(nan.clone())


def test_more_than_one_chunk(monkeypatch):
    tensor = random_tensor(torch.float32, 1000)
    whole = tensor_digest(tensor)
    monkeypatch.setattr("lightning_sp.checkpoint.contents.tensor_digest._CHUNK", 7)
    assert tensor_digest(tensor) == whole


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_parts_of_a_tensor_give_its_digest(sizes):
    tensor = random_tensor(torch.float32, sum(sizes), 3)
    parts, first = [], 0
    for size in sizes:
        parts.append(Part.of(tensor[first : first + size], first * 3))
        first += size
    digest = combined([*parts, *parts], tensor.numel())
    assert digest == tensor_digest(tensor)
    if sum(sizes) and len([each for each in sizes if each]) > 1:
        full = next(i for i, size in enumerate(sizes) if size)
        assert combined(parts[:full] + parts[full + 1 :], tensor.numel()) is None, "a part is missing"
    other = Part.of(tensor[: sizes[0]] + 1, 0)
    assert not sizes[0] or combined([*parts, other], tensor.numel()) is None, "replicas have come apart"


@pytest.mark.parametrize("shard_size", [2, 1])
def test_ranks_have_the_digest_of_the_whole(pools, shard_size):
    for found, wanted in pools(2).run(ranks.digests, shard_size):
        assert found == wanted
