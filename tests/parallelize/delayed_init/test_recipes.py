"""A tensor that is made from its recipe is, to the bit, the one that the same lines make without; the generator is where it would be."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from lightning_sp import SequenceParallelError
from lightning_sp.parallelize import DelayedWeights, materialize_meta, recorded

N = 160  # 160 x 160 float32 are 100 KiB: more than what stays real


def changed(weight: torch.Tensor) -> torch.Tensor:
    """Write to parts of a weight, with numbers of another, drawn ones and one that is looked at."""
    other = torch.rand(N, N)
    with torch.no_grad():
        weight.mul_(other.t()).add_(other.std())
        weight[0].bernoulli_(0.5)
        weight[:, 1] = other[1] * float(other[2, 3])
        weight[2].copy_(weight[3])
        weight[4].normal_()
    return weight


def copied_from_the_users() -> torch.Tensor:
    values = torch.from_numpy(np.arange(N * N, dtype=np.float32)).view(N, N)
    weight = torch.empty(N, N)
    weight.copy_(values)
    values.add_(1)  # the weight has the numbers from before
    return weight


def given_by_data() -> nn.Parameter:
    values, parameter = torch.from_numpy(np.ones((N, N), dtype=np.float32)), nn.Parameter(torch.empty(N, N))
    parameter.data = values
    parameter.data.mul_(2)
    return parameter


MADE = {
    "uniform": lambda: nn.Linear(N, N).weight,
    "normal, padding": lambda: nn.Embedding(N, N, padding_idx=3).weight,
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(N, 2 * N)),
    "truncated": lambda: nn.init.trunc_normal_(torch.empty(N, N), std=0.02),
    "sparse": lambda: nn.init.sparse_(torch.empty(N, N), 0.1),
    "drawn": lambda: torch.randn(N, N) / 3,
    "like": lambda: torch.rand_like(torch.empty(N, N)),
    "by numbers": lambda: torch.normal(torch.zeros(N, N), torch.rand(N, N)),
    "shuffled": lambda: torch.randperm(N * N),
    "chosen": lambda: torch.multinomial(torch.rand(N, 3 * N), N),
    "another generator": lambda: torch.empty(N, N).normal_(generator=torch.Generator().manual_seed(3)),
    "mask": lambda: torch.tril(torch.ones(2 * N, 2 * N, dtype=torch.bool)),
    "transposed": lambda: torch.empty(N, 2 * N).t().normal_(),
    "part": lambda: torch.zeros(N, N)[:, 3:90].normal_(),
    "half": lambda: nn.Linear(2 * N, 2 * N).to(torch.bfloat16).weight,
    "recurrent": lambda: nn.LSTM(N, N).weight_hh_l0,
    "heads": lambda: nn.MultiheadAttention(N, 4).in_proj_weight,
    "changed": lambda: changed(torch.rand(N, N)),
    "deep copy": lambda: changed(copy.deepcopy(nn.Linear(N, N)).weight),
    "the user's": copied_from_the_users,
    "by data": given_by_data,
    "found": lambda: torch.nonzero(torch.rand(N, N) > 0.5),
}


class Holder(nn.Module):
    """Holds a tensor as a parameter or a buffer."""

    def hold(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, nn.Parameter):
            self.tensor = tensor
        else:
            self.register_buffer("tensor", tensor)


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_from_a_recipe_is_what_the_lines_make(name):
    torch.manual_seed(1)
    expected, then = MADE[name]().detach(), torch.rand(3)
    torch.manual_seed(1)
    holder = Holder()
    with recorded(holder, draws=True):
        holder.hold(MADE[name]())
    assert torch.equal(torch.rand(3), then), "the generator is where it would be"
    weights, state = DelayedWeights.of(holder), torch.get_rng_state()
    assert weights.refusal is None
    assert (list(weights.names) == ["tensor"]) == (name not in ("by data", "found")), "these two are real at once"
    actual = weights.take("tensor") if weights.names else holder.tensor.detach()
    assert torch.equal(torch.get_rng_state(), state)
    assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert torch.equal(actual, expected)
    assert type(holder.tensor) in (nn.Parameter, torch.Tensor)


class Parts(nn.Module):
    """Everything that a module can hold a tensor in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(N, N), nn.Linear(N, N, bias=False)
        self.head.weight = self.embedding.weight
        self.recurrent = nn.LSTM(N, N)
        self.register_buffer("table", torch.rand(N, N))
        self.register_buffer("unsaved", torch.rand(N, N), persistent=False)
        self.plain, self.listed, self.named = torch.rand(N, N), [torch.rand(N, N), 3], {"a": torch.rand(N, N)}
        self.frozen = nn.Parameter(torch.rand(N, N), requires_grad=False)
        self.frozen.keep_me = True
        self.scale = nn.Parameter(torch.rand(3))


def parts(draws: bool | None) -> nn.Module:
    """Build `Parts`, recorded or (None) not."""
    torch.manual_seed(2)
    root = nn.Module()
    if draws is None:
        root.parts = Parts()
        return root
    with recorded(root, draws=draws):
        root.parts = Parts()
    return root


def test_parameters_and_buffers_are_of_the_meta_device_and_all_else_has_values():
    expected, actual = parts(None), parts(True)
    weights, held, plain = DelayedWeights.of(actual), actual.parts, expected.parts
    assert weights.refusal is None
    named = {**dict(actual.named_parameters()), **dict(actual.named_buffers())}
    assert set(weights.names) == {name for name, tensor in named.items() if tensor.is_meta}
    assert {name for name in named if name not in weights.names} == {
        "parts.scale", "parts.recurrent.bias_ih_l0", "parts.recurrent.bias_hh_l0",
    }  # fmt: skip
    assert held.head.weight is held.embedding.weight
    assert held.recurrent._flat_weights[0] is held.recurrent.weight_ih_l0
    assert (held.frozen.requires_grad, held.frozen.keep_me) == (False, True)
    assert "unsaved" not in held.state_dict()
    for values, others in (
        (held.plain, plain.plain),
        (held.listed[0], plain.listed[0]),
        (held.named["a"], plain.named["a"]),
    ):
        assert type(values) is torch.Tensor
        assert torch.equal(values, others)
    for name, tensor in (*expected.named_parameters(), *expected.named_buffers()):
        assert torch.equal(weights.take(name) if name in weights.names else named[name], tensor), name


def test_a_rank_that_does_not_draw_has_the_shapes_and_refuses_to_look():
    state = torch.get_rng_state()
    root = nn.Module()
    with recorded(root, draws=False):
        root.head = nn.Linear(N, N)
    assert not DelayedWeights.of(root).names
    assert root.head.weight.is_meta
    torch.set_rng_state(state)
    with pytest.raises(SequenceParallelError, match="rank 0 alone draws"), recorded(nn.Module(), draws=False):
        float(torch.rand(N, N).sum())


def test_a_cast_of_the_module_is_noted_and_nothing_that_it_loses_comes_back():
    root = nn.Module()
    torch.manual_seed(1)
    expected = nn.Linear(N, N).to(torch.bfloat16).float().weight.detach()
    torch.manual_seed(1)
    with recorded(root, draws=True):
        root.router = nn.Linear(N, N)
    weights = DelayedWeights.of(root)
    for dtype in (torch.bfloat16, torch.float32):
        root.to(dtype)
        weights.note_dtypes(root)
    assert torch.equal(weights.take("router.weight"), expected)


def test_a_tensor_that_no_module_holds_is_refused():
    class Outside:
        pass

    outside, root = Outside(), nn.Module()
    with recorded(root, draws=True):
        root.head = nn.Linear(N, N)
        outside.tensor = root.head.weight.detach()
    refusal = DelayedWeights.of(root).refusal
    assert refusal is not None
    assert refusal.startswith(
        "1 large tensors that configure_model has made (64 KiB and more) are held by something that is no module"
    )


def test_a_tensor_that_is_written_to_after_configure_model_is_refused():
    values, root = torch.ones(N, N), nn.Module()
    with recorded(root, draws=True):
        root.head = nn.Linear(N, N)
        root.head.load_state_dict({"weight": values, "bias": torch.zeros(N)})
    weights = DelayedWeights.of(root)
    values.mul_(2)
    with pytest.raises(
        SequenceParallelError,
        match=r"a tensor \(160, 160\) that configure_model copied into a parameter was written to",
    ):
        weights.take("head.weight")


def test_what_the_user_puts_on_meta_is_reset_and_recipes_stay():
    def build(root: nn.Module) -> None:
        root.embedding, root.head = nn.Embedding(N, N), nn.Linear(N, N, bias=False)
        root.head.weight = root.embedding.weight
        with torch.device("meta"):
            root.deferred = nn.Linear(N, N)

    torch.manual_seed(1)
    expected, actual = nn.Module(), nn.Module()
    build(expected)
    materialize_meta(expected, torch.device("cpu"))
    torch.manual_seed(1)
    with recorded(actual, draws=True):
        build(actual)
    weights = DelayedWeights.of(actual)
    with recorded(actual, draws=True):
        materialize_meta(actual, torch.device("cpu"), weights.names)
    weights.add(DelayedWeights.of(actual))
    assert actual.head.weight is actual.embedding.weight
    assert set(weights.names) == {"embedding.weight", "deferred.weight"}
    for name, value in expected.named_parameters():
        own = weights.take(name) if name in weights.names else actual.get_parameter(name)
        assert torch.equal(own, value), name


def test_what_another_thread_makes_is_refused_where_it_is_used():
    with recorded(nn.Module(), draws=True), ThreadPoolExecutor() as threads:
        doubled = threads.submit(torch.mul, torch.ones(N, N), 2).result()
        with pytest.raises(SequenceParallelError, match=r"a tensor \(160, 160\) without memory was made where"):
            doubled.add(1)
