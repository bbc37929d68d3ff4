"""Several tensors on a device as views of one copy: each with its numbers, its dtype and its class."""

from __future__ import annotations

import pytest
import torch

from lightning_sp import devices

CPU = torch.device("cpu")


class Labelled(torch.Tensor):
    """A tensor that is more than its numbers."""


TENSORS = [
    torch.arange(7),
    torch.tensor(3.5, dtype=torch.float64),
    torch.zeros(0, 4),
    torch.tensor([True, False, True]),
    torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).T,
    torch.randn(5, generator=torch.Generator().manual_seed(1)).bfloat16(),
    torch.arange(6, dtype=torch.int8).view(2, 3),
    torch.tensor([1 + 2j]),
]


@pytest.fixture
def as_accelerator(monkeypatch):
    """Takes the CPU for a device that computes while the host goes on."""
    monkeypatch.setattr(devices, "is_accelerator", lambda _: True)


def test_each_has_its_numbers_and_all_share_one_memory(as_accelerator):
    copies = devices.copies_on(TENSORS, CPU)
    for copy, tensor in zip(copies, TENSORS, strict=True):
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(copy, tensor)
        assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1


def test_what_is_more_than_numbers_goes_by_itself(as_accelerator):
    sparse = torch.eye(3).to_sparse()
    weight = torch.ones(2, requires_grad=True)
    labelled = torch.ones(2).as_subclass(Labelled)
    number, *others = devices.copies_on([torch.ones(2), sparse, weight, labelled], CPU)
    assert number.untyped_storage().data_ptr() != others[1].untyped_storage().data_ptr()
    assert others[0].is_sparse
    assert others[1].requires_grad
    assert type(others[2]) is Labelled


def test_on_the_cpu_nothing_is_copied():
    assert all(a is b for a, b in zip(devices.copies_on(TENSORS, CPU), TENSORS, strict=True))
