"""Stepping each unit in the backward is, to the bit, stepping all behind it; gradients of one unit are in memory."""

from __future__ import annotations

import pytest
import torch

from tests.trainer.optimizers import in_backward_ranks as ranks

ON = dict(optimizer_in_backward=True)
CASES = [
    dict(build="untied", options=dict(amsgrad=True)),
    dict(build="tied", optimizer="SGD", options=dict(momentum=0.9), strategy=dict(reshard_after_forward=False)),
    dict(build="untied", options=dict(fused=True), strategy=dict(activation_checkpointing="full")),
    dict(build="untied", options=dict(foreach=True), strategy=dict(global_view=True)),
    dict(build="experts"),
    dict(build="untied", optimizer="Adafactor"),  # steps whole weights
    dict(build="untied", optimizer="Rprop"),  # known by a trial
    dict(build="tied", in_flight=1, strategy=dict(preflight=True)),
    dict(build="untied", strategy=dict(gather_dtype="auto"), precision="bf16-mixed", max_steps=5),
    *(dict(build=how) for how in ("twice", "once", "unread", "looked at", "penalized")),
]
# Those of which a unit is known to be complete only when the backward ends.
LATE = ("once", "unread")
# Each form of stepping, each way that a unit is used.
FAST = [0, 1, 2, 4, 5, 9, 11, 13]
LAYOUTS = [
    pytest.param(1, dict(), [0], id="1"),
    pytest.param(2, dict(ring_size=2), FAST, id="2"),
    pytest.param(
        2, dict(ring_size=2), [i for i in range(len(CASES)) if i not in FAST], id="2, more", marks=pytest.mark.slow
    ),
    pytest.param(2, dict(tensor_parallel_size=2), [0], id="tensor parallel", marks=pytest.mark.slow),
    pytest.param(
        4, dict(data_parallel_size=2, ulysses_size=2, shard_size=2), [1, 4, 5], id="4", marks=pytest.mark.slow
    ),
]


def both(pool, world, layout, cases):
    """Return of each rank its fits without the option and with it."""
    given = [{**case, "world": world, "strategy": {**layout, **case.get("strategy", {})}} for case in cases]
    on = [{**case, "strategy": {**case["strategy"], **ON}} for case in given]
    return [(found[: len(cases)], found[len(cases) :]) for found in pool.run(ranks.fits, [*given, *on])]


def same(one, other):
    assert one["losses"] == other["losses"]
    for kind in ("weights", "states"):
        assert one[kind].keys() == other[kind].keys()
        for name, value in one[kind].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[kind][name])), name


@pytest.mark.parametrize(("world", "layout", "chosen"), LAYOUTS)
def test_a_fit_is_to_the_bit_that_of_steps_behind_the_backward(pools, world, layout, chosen):
    cases = [CASES[number] for number in chosen]
    for plain, in_backward in both(pools(world), world, layout, cases):
        for case, one, other in zip(cases, plain, in_backward, strict=True):
            same(one, other)
            assert other["left"] == 0
            assert other["predicted"] == max(other["units"].values())
            steps, largest = other["steps"], max(other["units"].values())
            # A head, two blocks, and behind the backward what is left; tied, the head is of what is left.
            num = 2 if case["build"] in LATE else 3 if case["build"] == "tied" else 4
            # The last of those that are on their way are stepped behind it, too.
            assert len(steps) == case.get("max_steps", 3) * (num - case.get("in_flight", 0)), steps
            if case["build"] in LATE:
                continue
            # Beside the largest unit what the model itself holds, in 256 bytes, and what this rank has not used.
            unused = 2 * 4 * 1100 if case["build"] == "experts" else 0
            assert other["most"] <= (1 + case.get("in_flight", 0)) * largest + 256 + unused
            assert one["most"] == 0, "without the option no unit is stepped by itself"


@pytest.mark.slow
def test_a_run_is_resumed_with_the_option_and_without(pools, tmp_path):
    """Both write the same checkpoint, and go on from the other's."""
    layout = dict(ring_size=2)
    paths = {on: str(tmp_path / str(on)) for on in (False, True)}
    saves = [dict(world=2, strategy={**layout, "optimizer_in_backward": on}, save=paths[on]) for on in (False, True)]
    goes_on = [
        dict(world=2, strategy={**layout, "optimizer_in_backward": on}, resume=paths[saved], max_steps=5)
        for saved in (False, True)
        for on in (False, True)
    ]
    pools(2).run(ranks.fits, saves)
    for first, *others in pools(2).run(ranks.fits, goes_on):
        for other in others:
            same(first, other)
    written = [ranks.stored(path) for path in paths.values()]
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(value, written[1][name]) for name, value in written[0].items())


def test_a_loss_that_is_not_finite_is_explained_with_the_weights_that_made_it(pools):
    for plain, found in pools(2).run(ranks.not_finite, 2, dict(ring_size=2)):
        assert plain == found
    said = pools(2).run(ranks.not_finite, 2, dict(ring_size=2))[0][0]
    assert any("is the first module whose output is not" in each for each in said), said


def test_a_reentrant_checkpoint_of_what_runs_twice_is_refused(pools):
    """On one rank too, where no preflight compares: gradients were lost."""
    for world, layout in ((1, dict()), (2, dict(ring_size=2))):
        for found in pools(world).run(ranks.reentrant, world, layout):
            for said in found:
                assert said.startswith("the backward went on when FSDP's had ended: gradients of model.layers.0.")
                assert " and 17 other parameters were not added up. A reentrant checkpoint" in said


REFUSED = {
    "accumulation": "accumulate_grad_batches=2: the gradients of 2 micro-batches are added up before the step",
    "clipping": "gradient_clip_val=0.5: gradients are clipped when all of them are known",
    "own clipping": "OwnClipping.configure_gradient_clipping: gradients are clipped when all of them are known",
    "manual": "manual optimization: when the optimizer steps is the step's own affair",
    "looks": "Looks.on_before_optimizer_step: it would see no gradients",
    "callback": "LooksBehind.on_after_backward: it would see no gradients",
    "zeroes": "Zeroes.optimizer_zero_grad: gradients are freed as weights are stepped",
    "LBFGS": "LBFGS: it could not be tried on small weights (TypeError: ",
    "norm of all": "NormOfAll: it moves a weight of shape (4, 3) otherwise when others are stepped after it",
    "hooks": "1 hooks of AdamW's step: it steps once for each block",
    "wrapper": "Wrapper: it could not be tried on small weights (TypeError: ",
    "second backward": "a second backward through model.inner.",
}


def test_what_needs_all_gradients_is_refused_by_name(pools):
    for found in pools(2).run(ranks.refusals, 2, dict(ring_size=2), [*REFUSED]):
        for name, said in zip(REFUSED, found, strict=True):
            assert said.startswith(f"optimizer_in_backward=True with {REFUSED[name]}"), said


def test_a_gradient_with_a_graph_is_not_the_last_backward_of_a_unit(pools):
    """What it goes through is gone through once more."""
    for plain, in_backward in both(pools(2), 2, dict(ring_size=2), [dict(build="judged")]):
        same(plain[0], in_backward[0])
