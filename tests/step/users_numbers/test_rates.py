"""A step that reads its learning rate is tried as at the rates that are to come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from lightning_sp.step.users_numbers.rates import extreme_moments, noted_rates, rates_as_at
from lightning_sp.trainer.shown_progress import Moment
from tests.slow import slow
from tests.step.users_numbers import rates_ranks


def run(schedule: Any, **options: Any) -> nn.Module:
    """Return a module whose run has 40 steps in 4 epochs."""
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    config = SimpleNamespace(**{"scheduler": schedule(optimizer), "interval": "step", "frequency": 1, **options})
    usual = dict(num_training_batches=10, accumulate_grad_batches=1, max_steps=-1, max_epochs=4, global_step=0)
    run = dict(
        current_epoch=0,
        lr_scheduler_configs=[config] if config.scheduler else [],
        callbacks=[],
        fit_loop=SimpleNamespace(_combined_loader=None),
    )
    automatic = SimpleNamespace(automatic_optimization=True)
    trainer = SimpleNamespace(**usual, **run, optimizers=[optimizer], lightning_module=automatic)
    module.trainer = module._trainer = trainer
    return module


def rising_and_falling(optimizer: Any) -> Any:
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, lr_scheduler.CosineAnnealingLR(optimizer, 30)], [10])


def test_what_the_users_code_reads_is_noted():
    module = run(lambda optimizer: lr_scheduler.StepLR(optimizer, 10))
    (optimizer,), schedule = module.trainer.optimizers, module.trainer.lr_scheduler_configs[0].scheduler
    groups = optimizer.param_groups
    with noted_rates(module.trainer) as read:
        assert len([p for group in optimizer.param_groups for p in group["params"]]) == 2
        optimizer.step()
        schedule.step()
        assert not read
        assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0].get("momentum")) == (0.1, 0)
        assert schedule.get_last_lr() == [0.1]
        assert read == {"lr", "momentum", "get_last_lr"}
    assert optimizer.param_groups is groups
    assert type(schedule) is lr_scheduler.StepLR


@pytest.mark.parametrize(
    ("schedule", "options", "moments"),
    [
        (rising_and_falling, {}, [(10, 1), (39, 3)]),
        (lambda optimizer: lr_scheduler.StepLR(optimizer, 10, 0.1), {}, [(1, 1), (30, 3)]),
        (lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5), {"interval": "epoch"}, [(13, 1), (39, 3)]),
        (lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20), {}, [(5, 1), (19, 2)]),
        (lambda optimizer: None, {}, []),
    ],
    ids=["sequence", "steps", "epochs", "ends", "none"],
)
def test_the_moments_of_the_largest_and_the_smallest_rate(schedule, options, moments):
    module = run(schedule, **options)
    before = module.trainer.optimizers[0].param_groups[0]["lr"]
    assert extreme_moments(module) == [Moment(*each) for each in moments]
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == before


@pytest.mark.parametrize(
    ("schedule", "shown"),
    [
        (lambda optimizer: lr_scheduler.StepLR(optimizer, 10, 0.1), 0.01),
        (rising_and_falling, 0.1),
        (lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, min_lr=0.02), 0.02),
        (lambda optimizer: None, 0.1 * 1e-3),
    ],
    ids=["steps", "sequence", "plateau", "none"],
)
def test_rates_are_shown_as_later_and_put_back(schedule, shown):
    module = run(schedule)
    (optimizer,), configs = module.trainer.optimizers, module.trainer.lr_scheduler_configs
    kept = [each.scheduler for each in configs] + [s for c in configs for s in getattr(c.scheduler, "_schedulers", ())]
    before = dict(optimizer.param_groups[0]), [repr(vars(each)) for each in kept]
    with rates_as_at(module, Moment(10, 1), 0) as words:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(shown)
        assert words == f"lr={shown:.3g}"
    assert (dict(optimizer.param_groups[0]), [repr(vars(each)) for each in kept]) == before


def test_a_schedule_of_many_steps_is_taken_in_strides():
    module = run(lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 1_000_000))
    module.trainer.max_steps, module.trainer.max_epochs = 1_000_000, -1
    with rates_as_at(module, Moment(500_000, 5), 0):
        assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("kind", "after", "shown"),
    [
        ("group", 0, "as at optimizer step 7 in epoch 0 (lr=0.03)"),
        *slow(("last rate", 0, "as at optimizer step 7 in epoch 0 (lr=0.0125)")),
        *slow(("plateau", 0, "as at optimizer step 4 in epoch 0 (lr=0.01)")),
        ("hook", 6, "after 6 optimizer steps"),
    ],
)
def test_what_begins_at_a_lower_rate_is_refused_before_it(pools, kind, after, shown):
    for found in pools(2).run(rates_ranks.fit, kind):
        assert shown in found["error"]
        assert "gives another result on shards than whole" in found["error"]
        assert found["steps"] == after
