"""What the tests of added parameters run on real ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parallelize import check_added, run_with_whole_parameters, used_as_whole


def _said(model):
    try:
        check_added(model)
        return ""
    except SequenceParallelError as error:
        return str(error)


def added():
    """Return what is said of a model as it was sharded, gathered, with a frozen part more, with another weight, and with a new bias."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    found = [_said(model)]
    model.eval()(torch.ones(2, 4))
    assert type(model[0].weight.data) is torch.Tensor  # the root stays gathered
    found.append(_said(model))
    model.teacher = nn.Linear(4, 3).requires_grad_(False)
    found.append(_said(model))
    model.reshard()
    kept, model[1].weight = model[1].weight, nn.Parameter(torch.zeros(2, 3))
    found.append(_said(model))
    model[1].weight, model.extra = kept, nn.Linear(3, 2)
    model.extra.weight.requires_grad_(False)
    found.append(_said(model))
    return [*found, _tied(model, nn.Linear(4, 3)), _pruned(model)]


def _pruned(model):
    """Return what is said of a weight that is pruned."""
    with used_as_whole(model):
        prune.l1_unstructured(model[0], "weight", amount=0.3)
    return _said(model)


def _tied(model, other):
    """Return what is said of a weight that a hook puts in another's place, and of one that a step puts there; elsewhere it may."""
    model.extra = nn.Identity()
    kept, model[0].weight = model[0].weight, model[1].weight
    hooked = _said(model)
    model[0].weight = kept
    try:
        run_with_whole_parameters(lambda: setattr(model[0], "weight", model[1].weight))
        return hooked, "went on"
    except SequenceParallelError as error:
        run_with_whole_parameters(lambda: setattr(model[0], "weight", kept))
        run_with_whole_parameters(lambda: setattr(other, "weight", model[1].weight))
        return hooked, str(error)
