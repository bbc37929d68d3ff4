"""The preflight: passes what is exact, stops what is not, leaves no trace."""

from __future__ import annotations

import re

import pytest
import torch

from lightning_sp import SequenceParallelError
from lightning_sp.parallelize import LearnsOutsideError
from lightning_sp.preflight import backward
from tests.preflight import preflight_ranks as ranks
from tests.slow import slow

AGREE = r"preflight: a crop of (\d+) x (\d+) tokens, whole and sharded, agree: .* gradient ([\d.e+-]+) \((\S*); allowed (\S+)\)"


# case -> (rows, tokens, tolerance) of the crop
PASSES = [
    (dict(build="llama"), (2, 64, 1e-8)),
    (dict(build="llama", data={"packed": True}, strategy={"ring_size": 2}), (2, 64, 1e-8)),
    (dict(build="llama", data={"length": 97}, strategy={"ring_size": 2}), (2, 61, 1e-8)),
    (dict(build="llama", strategy={"preflight_tokens": 21}), (2, 22, 1e-8)),
    (dict(build="llama", strategy={"data_parallel_size": 1, "activation_checkpointing": True}, accumulate_grad_batches=2), (2, 64, 1e-8)),
    (dict(build="llama", strategy={"shard_size": 1}, batch="late targets"), (2, 64, 1e-8)),
    (dict(build="dropout gpt"), (2, 64, 1e-8)),
    (dict(build="penalised", kind="penalised"), (2, 64, 1e-8)),
    (dict(build="moving by steps"), (2, 64, 1e-8)),
    (dict(build="parametrized"), (2, 64, 1e-8)),
    (dict(build="llama", kind="over_rows", strategy={"ring_size": 2}), (2, 64, 1e-8)),
    (dict(build="llama", kind="tuple", batch="tuple"), (2, 64, 1e-8)),
    (dict(build="llama", kind="masked_by_position"), (2, 64, 1e-8)),
    (dict(build="llama", kind="manual", strategy={"ring_size": 2}), (2, 64, 1e-8)),
    (dict(build="zero", strategy={"ring_size": 2}), (2, 64, 1e-8)),
    (dict(build="hf llama", kind="hf_loss", batch="hf", strategy={"ring_size": 2}), (2, 64, 1e-3)),
    (dict(build="hf gpt2", kind="hf", precision="bf16-mixed", strategy={"ring_size": 2}), (2, 64, 8e-2)),
]  # fmt: skip
# Of other precisions, models or ways to the same numbers.
MORE_PASSES = [
    (dict(build="llama", precision="bf16-mixed", strategy={"ring_size": 2}), (2, 64, 8e-2)),
    (dict(build="llama", kind="masked_by_value"), (2, 64, 1e-8)),
    (dict(build="llama", kind="summed", strategy={"ring_size": 2}), (2, 64, 1e-8)),
    (dict(build="llama", kind="draws_unused", strategy={"ring_size": 2}), (2, 64, 1e-8)),
    (dict(build="gpt", strategy={"ring_size": 2}), (2, 64, 1e-8)),
    (dict(build="llama", data={"length": 31, "packed": True}), (2, 31, 1e-8)),
    (dict(build="bound name"), (2, 64, 1e-8)),
    (dict(build="llama", kind="row_means", strategy={"preflight_tokens": 96}), (2, 96, 1e-8)),
    (dict(build="llama", kind="counted", strategy={"ring_size": 2}), (2, 64, 1e-8)),
    (dict(build="hf llama", kind="hf", data={"packed": True}, strategy={"ring_size": 2}), (2, 64, 1e-3)),
    (dict(build="llama", precision="32-true"), (2, 64, 1e-3)),
    (dict(build="hf gemma2", kind="hf"), (2, 64, 1e-3)),
    (dict(build="hf qwen2", kind="hf", precision="bf16-true", strategy={"ring_size": 2}), (2, 64, 8e-2)),
    (dict(build="hf gpt2", kind="hf_bare", data={"packed": True}, strategy={"ring_size": 2}), (2, 64, 1e-8)),
    (dict(build="hf gpt2", kind="hf", precision="64-true", data={"packed": True}, strategy={"ring_size": 2}), (2, 64, 1e-8)),
]  # fmt: skip


# case -> what the message says
STOPS = [
    (dict(build="llama", kind="shifts"), ["cross_entropy over 62 targets = 2 rows x (32 - 1): the labels seem to be shifted inside"]),
    (dict(build="llama", kind="pooled"), ["cross_entropy over 2 targets, one for each of 2 rows: a pooled head"]),
    (dict(build="hand-written"), ["0 attention calls"]),
    (dict(build="llama", kind="random"), ["cannot be compared, since", "randn_like of (2, 64, 61) in training_step", "two seeds"]),
    (dict(build="llama", kind="counts_calls"), ["cannot be compared, since it is another each time", "twice from one seed"]),
    (dict(build="own positions", kind="manual_twice", strategy={"ring_size": 2}), ["gives another result"]),
    (dict(build="hand-written behind zero"), ["small numbers in model.out.weight, model.head.weight, which begin at zero, gives another"]),
    (dict(build="llama", kind="late", max_steps=5, data={"size": 10}), ["tokens after 3 optimizer steps gives another", "cumulative sum"]),
    (dict(build="clamped"), ["a forward writes to 1 of its parameters: model.part.linear.weight", "in training_step"]),
    (dict(build="long alone"), ["a crop of 1 x 96 tokens gives another result"]),
    (dict(build="moving by tokens"), ["leaves 1 of 1 buffers different", "model.seen: ||sharded - whole|| = 1.568e+02, ||change|| = 3.135e+02"]),
]  # fmt: skip
# Of other precisions, models or ways to the same numbers.
MORE_STOPS = [
    (dict(build="hand-written too"), ["gives another result", "attention that lightning_sp did not see"]),
    (dict(build="own positions"), ["gives another result", "positions made inside the model", "model.gpt.positions.weight"]),
    (dict(build="llama", kind="shifts_by_roll"), ["gives another result", "labels shifted inside the model"]),
    (dict(build="convolution"), ["gives another result", "(1) a convolution along the sequence: model.part.conv (Conv1d)"]),
    (dict(build="recurrence"), ["gives another result", "(1) a recurrence along the sequence: model.part.gru (GRU)"]),
    (dict(build="statistics"), ["gives another result", "(1) statistics over this rank's tokens alone: model.part.norm (BatchNorm1d)"]),
    (dict(build="llama", kind="mse"), ["training_step's loss differs between ranks"]),
    (dict(build="noisy embedding"), ["uniform_ of (2, 64, 32) in model", "preflight=False trains"]),
    (dict(build="llama", kind="python_random"), ["draws random numbers: random in training_step"]),
    (dict(build="own positions", kind="manual"), ["gives another result", "positions made inside the model"]),
    (dict(build="neighbours", data={"length": 100}, strategy={"ring_size": 2}), ["a crop of 1 x 100 tokens gives another result"]),
    (dict(build="moving by balance"), ["leaves 1 of 1 buffers different", "model.seen"]),
    (dict(build="moving by length"), ["leaves 1 of 1 buffers different", "model.seen: ||sharded - whole|| = inf"]),
    (
        dict(build="llama", kind="fixed_length", strategy={"preflight_tokens": 64}),
        ["fails on a crop of 2 x 64 tokens: RuntimeError: only 96 tokens fit", "set preflight_tokens"],
    ),
    (dict(build="own positions", precision="bf16-mixed"), ["gives another result"]),
    (dict(build="llama", kind="random", strategy={"ring_size": 2}), ["since the step draws random numbers: randn_like"]),
    (dict(build="llama", kind="numpy_random"), ["draws random numbers: numpy.random in training_step"]),
    (dict(build="own positions", kind="draws_unused"), ["gives another result"]),
    (dict(build="moving by balance", precision="bf16-mixed"), ["leaves 1 of 1 buffers different", "model.seen"]),
]  # fmt: skip


def answers(pools, cases):
    found = pools(2).run(ranks.preflights, cases)
    assert [a["error"] for a in found[0]] == [a["error"] for a in found[1]], "ranks decide alike"
    return found[0]


@pytest.mark.parametrize(
    "cases", [pytest.param(PASSES, id="most"), pytest.param(MORE_PASSES, id="more", marks=pytest.mark.slow)]
)
def test_what_is_exact_passes(pools, cases):
    found = answers(pools, [case for case, _ in cases])
    for (case, crop), answer in zip(cases, found, strict=True):
        assert not answer["error"], (case, answer["error"])
        said = [re.search(AGREE, line) for line in answer["said"] if line.startswith("preflight")]
        assert said, (case, answer["said"])
        assert all(said), (case, answer["said"])
        assert (int(said[0][1]), int(said[0][2]), float(said[0][5])) == crop, case
        # Once more at the whole length, where the first crop is shorter and no length was asked for.
        length = case.get("data", {}).get("length", 96)
        longer = (
            crop[1] < length and "preflight_tokens" not in case.get("strategy", {}) and case["build"] not in ranks.SHORT
        )
        assert [int(each[2]) for each in said[1:]] == [length] * longer, (case, answer["said"])
        for each in said:
            # Far below what is allowed: the tolerance is no excuse.
            assert float(each[3]) < {1e-8: 1e-12, 1e-3: 1e-5, 8e-2: 4e-2}[crop[2]], (case, each[0])


@pytest.mark.parametrize(
    "cases", [pytest.param(STOPS, id="most"), pytest.param(MORE_STOPS, id="more", marks=pytest.mark.slow)]
)
def test_what_is_not_exact_is_stopped(pools, cases):
    found = answers(pools, [case for case, _ in cases])
    for (case, parts), answer in zip(cases, found, strict=True):
        for part in parts:
            assert part in answer["error"], (case, answer["error"])
        if "gives another result" in answer["error"]:
            numbers = re.search(r"Loss (\S+) whole, (\S+) sharded\. (\d+) of (\d+) gradients differ", answer["error"])
            assert numbers, answer["error"]
            assert int(numbers[3]) > 0


def test_it_runs_again_after_some_steps(pools):
    cases = [
        dict(build="llama", max_steps=12, data={"size": 24}, accumulate_grad_batches=1),
        dict(build="llama", max_steps=4, data={"size": 16}, accumulate_grad_batches=2, strategy={"ring_size": 2}),
        dict(build="llama", kind="manual", max_steps=4, data={"size": 8}),
    ]
    plain, accumulated, manual = answers(pools, cases)
    for answer, steps in ((plain, [3, 10]), (accumulated, [3]), (manual, [3])):
        assert not answer["error"], answer["error"]
        found = [
            int(n)
            for line in answer["said"]
            for n in re.findall(r"2 x 64 tokens after (\d+) optimizer steps, whole and sharded, agree", line)
        ]
        assert found == steps, answer["said"]


@pytest.mark.slow
def test_in_16_bits_a_later_difference_is_said_and_training_goes_on(pools):
    case = dict(build="llama", kind="late", max_steps=5, data={"size": 10}, precision="bf16-true")
    found = pools(2).run(ranks.warnings_of, case)[0]
    assert len(found) == 1, found
    assert "after 3 optimizer steps gives another result" in found[0]


def test_weights_that_begin_at_zero_are_zero_afterwards(pools):
    for on, off in zip(pools(2).run(ranks.zero_weights, True), pools(2).run(ranks.zero_weights, False), strict=True):
        assert all(torch.equal(on[name], off[name]) for name in off)
        assert not on["model.out.weight"].any(), "its gradient is 0 while the head is"


def test_where_nothing_can_be_compared_it_says_so(pools):
    cases = [
        dict(build="llama", kind="nan"),
        dict(build="llama", kind="fixed_length", strategy={"preflight_tokens": 96}),
        dict(build="llama", kind="at_most_64"),
        dict(build="llama", kind="later_at_most_63", max_steps=4, data={"size": 8}),
        dict(build="convolution", strategy={"preflight": False}),
    ]
    nan, fixed, short, later, off = found = answers(pools, cases)
    assert not any(each["error"] for each in found), [each["error"] for each in found]
    assert any(
        "not compared after 3 optimizer steps: preflight: training_step fails on" in line for line in later["said"]
    )
    assert any("not compared at 96 tokens: preflight: training_step fails on" in line for line in short["said"])
    assert any("cannot be compared: whole, the loss is nan" in line for line in nan["said"])
    assert any("a crop of 2 x 96 tokens, whole and sharded, agree" in line for line in fixed["said"])
    assert not any("preflight" in line for line in off["said"])


def test_a_first_batch_without_targets_is_said(pools):
    answer = pools(2).run(ranks.warnings_of, dict(build="llama", batch="ignored"))[0]
    assert answer == [
        "preflight: not possible, for every target of the first batch is ignored: nothing was compared; a later one will be"
    ]


# case -> rows and tokens of the crop
PASSES_OF_4 = [
    (dict(build="gpt"), (4, 64)),
    (dict(build="llama", data={"packed": True}), (4, 64)),
    (dict(build="llama", batch="one group"), (4, 64)),
    (dict(build="llama", batch="other lengths"), (4, 50)),
    (dict(build="gpt", strategy={"data_parallel_size": 4, "shard_size": 2}, data={"size": 8}), (8, 64)),
    (dict(build="llama", kind="over_rows"), (4, 64)),
    (dict(build="llama", kind="over_rows", strategy={"data_parallel_size": 4}, data={"size": 8}), (8, 64)),
]


STOPS_OF_4 = [
    (dict(build="own positions"), ["gives another result"]),
    (dict(build="llama", kind="of_all_over_rows"), ["gives another result", "a loss divided by the batch's rows"]),
    (dict(build="llama", batch="other entries"), ["data-parallel groups 0 and 1 cannot be joined", "'names': 'list'"]),
]  # fmt: skip


@pytest.mark.slow
def test_the_whole_is_the_batch_of_all_data_parallel_groups(pools):
    strategy = dict(data_parallel_size=2, ring_size=2, shard_size=2)
    cases = [{"world": 4, "strategy": strategy, **case} for case, _ in (*PASSES_OF_4, *STOPS_OF_4)]
    found = pools(4).run(ranks.preflights, cases)
    assert all([a["error"] for a in each] == [a["error"] for a in found[0]] for each in found), "ranks decide alike"
    for (case, (rows, tokens)), answer in zip(PASSES_OF_4, found[0][: len(PASSES_OF_4)], strict=True):
        said = [re.search(AGREE, line) for line in answer["said"] if line.startswith("preflight")]
        assert said, (case, answer)
        assert all(said), (case, answer)
        assert (int(said[0][1]), int(said[0][2])) == (rows, tokens), case
        assert all(float(each[3]) < 1e-12 for each in said), case
    for (case, parts), answer in zip(STOPS_OF_4, found[0][len(PASSES_OF_4) :], strict=True):
        assert all(part in answer["error"] for part in parts), (case, answer["error"])


def test_a_batch_sharded_by_hand_is_gathered(pools):
    said = pools(2).run(ranks.hand_sharded, 2)[0]["said"]
    assert any(re.search(AGREE, line) for line in said), said


def test_one_process_has_nothing_to_compare(pools):
    answer = pools(1).run(ranks.preflights, [dict(build="convolution", world=1)])[0][0]
    assert not answer["error"]
    assert not any("preflight" in line for line in answer["said"])


@pytest.mark.parametrize("accumulate", [1, *slow(2)])
def test_no_trace(pools, accumulate):
    """Bit for bit: a run with the preflight is the run without."""
    for on, off in pools(2).run(ranks.traces_with_and_without, 2, accumulate):
        assert not off.pop("said")
        said = on.pop("said")
        assert on["plain"][0] == 4
        assert torch.equal(on["buffers"]["count"], torch.tensor([256.0], dtype=torch.float64)), "4 steps, nothing else"
        for key in on:
            assert repr_of(on[key]) == repr_of(off[key]), key
    assert said is not None


def repr_of(value):
    """Every bit of nested containers of tensors."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: repr_of(each) for key, each in value.items()}
    return [repr_of(each) for each in value] if isinstance(value, (list, tuple)) else value


class RunsFreedLayers(torch.autograd.Function):
    """Its backward fails as one where a layer's weight is a shard again."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("aten.native_layer_norm.default got mixed torch.Tensor and DTensor"),
        LearnsOutsideError("layer_norm of a weight of shape (2,)"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_backward_that_runs_freed_layers_is_named(error):
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(
        SequenceParallelError,
        match=r"the backward of training_step runs layers whose weights FSDP has freed.*as Reformer's",
    ):
        backward.gradients_of(layer, RunsFreedLayers.apply(layer(torch.ones(1, 2)), error).sum())
