"""What the ranks of test_sharded_tensors run."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_sp import SequenceParallelError
from lightning_sp.parallelize import used_as_whole


def _sharded() -> nn.Linear:
    torch.manual_seed(1)
    linear = nn.Linear(3, 5, dtype=torch.float64)
    fully_shard(linear, mesh=init_device_mesh("cpu", (2,)))
    linear(torch.ones(1, 3, dtype=torch.float64))
    linear.reshard()  # type: ignore[operator]
    return linear


def _read(weight: Any) -> list[Any]:
    numbers = [weight.norm(), weight.sum(), weight.abs().max(), weight.mean(), (weight > 0).sum()]
    return [
        *(each.item() for each in numbers),
        float(numbers[0]),
        int(numbers[-1]),
        bool(weight.sum() > 0),
        bool(weight.isnan().any()),
        # As Lightning's `grad_norm` makes its total.
        *torch.tensor([weight.norm(), weight.data.norm(1), weight.sum(), weight.max(), weight.std()]).tolist(),
        (weight / weight.norm()).abs().sum().item(),
        # Functions leave a sum that is not finished, which `item` finishes.
        torch.sum(weight).item(),
        float(f"{weight.norm():.16e}"),
        *nn.Parameter(weight).tolist()[4],
        float(torch.linalg.vector_norm(weight)),
    ]


def numbers() -> tuple[list[Any], list[Any], list[Any]]:
    """Return the numbers of a sharded weight in a run, behind it, and those of the whole one."""
    weight = _sharded().weight.detach()
    with used_as_whole(nn.Identity()):
        found = _read(weight)
    return found, _read(weight), _read(weight.full_tensor())  # type: ignore[attr-defined]


def assigned() -> tuple[bool, bool, bool, str, str]:
    """Assign data as averages do; return whether the forward, the backup and a vector of all are right, and two refusals."""
    linear = _sharded()
    x = torch.ones(1, 3, dtype=torch.float64)
    with used_as_whole(linear):
        backup, wanted = linear.weight.data, (linear.weight.detach() * 2).full_tensor()  # type: ignore[attr-defined]
        bias = linear.bias.detach().full_tensor()  # type: ignore[attr-defined]
        linear.weight.data = linear.weight.data * 2
        doubled = torch.allclose(linear(x), x @ wanted.T + bias, rtol=1e-14)
        linear.reshard()  # type: ignore[operator]
        linear.weight.data = backup
        restored = torch.equal(linear.weight.full_tensor() * 2, wanted)  # type: ignore[attr-defined]
        vector = nn.utils.parameters_to_vector(linear.parameters())
        nn.utils.vector_to_parameters(vector * 3, linear.parameters())
        tripled = torch.allclose(linear(x), x @ wanted.T * 1.5 + bias * 3, rtol=1e-14)
        linear.reshard()  # type: ignore[operator]
        refusals = []
        for value in (torch.zeros(5, 3, dtype=torch.float64), linear.bias.data):
            try:
                linear.weight.data = value
                refusals.append("")
            except SequenceParallelError as error:
                refusals.append(str(error))
    return doubled, restored, tripled, refusals[0], refusals[1]


def behind_worlds() -> list[bool]:
    """Return whether numbers are whole in each of two worlds, and whether torch's own DTensor is back behind each."""
    found = []
    for number in range(2):
        if number:
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        else:
            weight = _sharded().weight.detach()
            with used_as_whole(nn.Identity()):
                found.append("data" in vars(DTensor) and not isinstance(weight.sum(), DTensor))
        with used_as_whole(nn.Identity()):
            found.append("data" in vars(DTensor))
        torch.distributed.destroy_process_group()
        found.append("data" not in vars(DTensor) and "norm" not in vars(DTensor))
    return found


def _first(t: Any) -> None:
    t[0].zero_()


def _rows(t: Any) -> None:
    t[1:4] = 0


def _columns(t: Any) -> None:
    t[:, 1] += 2


def _listed(t: Any) -> None:
    t[torch.tensor([0, 4])] = torch.arange(3.0, dtype=torch.float64)


def _masked(t: Any) -> None:
    t[t > 5] = -1.0


def _chunks(t: Any) -> None:
    a, b = t.chunk(2)
    a.mul_(3)
    b.sub_(1)


def _within(t: Any) -> None:
    t[1:][2][1:].fill_(7)


def _diagonal(t: Any) -> None:
    t.diagonal().add_(1)


def _unbound(t: Any) -> None:
    for number, row in enumerate(t.unbind(0)):
        row.mul_(number)


def _copied(t: Any) -> None:
    t[0].copy_(t[4])


def _narrowed(t: Any) -> None:
    torch.nn.init.constant_(t.narrow(0, 2, 2), 5.0)


PARTS = (_first, _rows, _columns, _listed, _masked, _chunks, _within, _diagonal, _unbound, _copied, _narrowed)


def parts() -> list[tuple[str, bool]]:
    """Write to parts of a weight, of its data and of its gradient, sharded and whole; return whether both are the same."""
    module, found = _sharded(), []
    with used_as_whole(module), torch.no_grad():
        for write in PARTS:
            for of in (lambda p: p, lambda p: p.data, lambda p: p.grad):
                values = torch.arange(15.0, dtype=torch.float64).view(5, 3)
                one = torch.nn.Parameter(values.clone())
                one.grad = values.clone()
                parameter = module.weight
                parameter.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements))
                parameter.grad = distribute_tensor(values, parameter.device_mesh, parameter.placements)
                write(of(one))
                write(of(parameter))
                found.append((write.__name__, torch.equal(of(parameter).full_tensor(), of(one))))
    return found


def drawn() -> list[bool]:
    """Draw a weight anew, and noise like it, on all ranks from one seed; return whether they are one device's."""
    module, found = _sharded(), []
    with used_as_whole(module), torch.no_grad():
        for draw in (nn.init.normal_, nn.init.xavier_uniform_, torch.randn_like, torch.rand_like):
            torch.manual_seed(7)
            one = draw(torch.zeros(5, 3, dtype=torch.float64))
            torch.manual_seed(7)
            found.append(torch.equal(draw(module.weight).full_tensor(), one))
    return found


INDEX, ONES = torch.tensor([0, 4]), torch.ones(2, 3, dtype=torch.float64)
# What DTensor has no rule for, or reads and writes a shard by as if it were the whole.
WITHOUT_RULE: dict[str, Any] = {
    "mask": lambda w: w[w > 0],
    "mask of rows": lambda w: w[torch.arange(5) % 2 == 0],
    "tolist": lambda w: torch.tensor(w.tolist()),
    "allclose": lambda w: torch.tensor(torch.allclose(w, w + 1e-12)),
    "unique": lambda w: w.sign().unique(),
    "nonzero": lambda w: (w > 0).nonzero(),
    "gather": lambda w: w.gather(0, torch.tensor([[4, 3, 0]])),
    "renorm": lambda w: torch.renorm(w, 2, 0, 0.1),
    "searchsorted": lambda w: torch.searchsorted(w[0].sort().values, torch.zeros((), dtype=w.dtype)),
    "deepcopy": lambda w: copy.deepcopy(w * 1),
    "index_fill_": lambda w: w.clone().index_fill_(0, INDEX, 1.0),
    "index_add_": lambda w: w.clone().index_add_(0, INDEX, ONES),
    "index_copy_": lambda w: w.clone().index_copy_(0, INDEX, ONES),
    "scatter_": lambda w: w.clone().scatter_(0, torch.tensor([[3] * 3]), 0.5),
    "put_": lambda w: w.clone().put_(torch.tensor([3, 14]), ONES[0, :2]),
    "renorm_": lambda w: w.clone().renorm_(2, 0, 0.1),
    "fill_diagonal_": lambda w: w.clone().fill_diagonal_(1.0),
    "tril_": lambda w: w.clone().tril_(),
    "addmm_": lambda w: w.clone().addmm_(w, torch.eye(3, dtype=w.dtype)),
    "eye_": lambda w: torch.nn.init.eye_(w.clone()),
}


def without_rule() -> dict[str, bool]:
    """Do to a sharded weight what DTensor has no rule for; which results are one device's."""
    linear = _sharded()
    weight: Any = linear.weight.detach()
    whole, same = weight.full_tensor(), {}
    with used_as_whole(linear):
        for name, run in WITHOUT_RULE.items():
            found = run(weight)
            same[name] = torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, run(whole))
    return same


def learning_without_rule() -> dict[str, bool]:
    """The same of a weight that learns, where nothing is written to, and the gradient behind it."""
    linear = _sharded()
    weight: Any = linear.weight
    whole, same = weight.full_tensor().detach().requires_grad_(), {}
    with used_as_whole(linear):
        for name in ("mask", "mask of rows", "allclose", "unique", "renorm"):
            found, alone = (WITHOUT_RULE[name](each) for each in (weight, whole))
            same[name] = torch.equal(found, alone)
            if alone.requires_grad and name != "unique":
                (slope,) = torch.autograd.grad(found.pow(2).sum(), weight)
                same[f"gradient of {name}"] = torch.equal(
                    slope.full_tensor(), *torch.autograd.grad(alone.pow(2).sum(), whole)
                )
    return same


def _columns_of(row: Any) -> Any:
    """Return a matrix of which each rank has rows, beside a row of which one has none."""
    matrix = torch.arange(12, dtype=torch.float64).view(4, 3)
    return distribute_tensor(matrix, row.device_mesh, [Shard(0)]) if isinstance(row, DTensor) else matrix


# What fails on a rank that has no number, of a weight of one row.
OF_SOME: dict[str, Any] = {
    "max": lambda w: w.abs().max(),
    "min of columns": lambda w: w.min(0).values,
    "amax": lambda w: w.amax(),
    "argmax": lambda w: w.argmax(),
    "aminmax": lambda w: torch.aminmax(w).max,
    "median": lambda w: w.median(0).values,
    "quantile": lambda w: torch.quantile(w, 0.5),
    "topk": lambda w: w.flatten().topk(1).values,
    "kthvalue": lambda w: w.flatten().kthvalue(1).values,
    "mode": lambda w: w.flatten().mode().values,
    "the largest, a norm": lambda w: w.norm(float("inf")),
    "the smallest, a norm": lambda w: torch.linalg.vector_norm(w, -torch.inf),
    "a total norm": lambda w: torch.nn.utils.get_total_norm([w, _columns_of(w), w * 2], torch.inf),
    "a plain norm": lambda w: w.norm(),
    "a sum": lambda w: w.sum(),
}


def of_some() -> dict[str, bool]:
    """Do so to a weight of one row, of which the second rank has nothing: in a run, and where it learns."""
    torch.manual_seed(1)
    linear = nn.Linear(3, 1, dtype=torch.float64)
    fully_shard(linear, mesh=init_device_mesh("cpu", (2,)))
    whole, same = linear.weight.full_tensor().detach(), {}  # type: ignore[operator]
    with used_as_whole(linear):
        for name, run in OF_SOME.items():
            for weight in (linear.weight, linear.weight.detach()):
                found = run(weight)
                found = found.full_tensor() if isinstance(found, DTensor) else found
                same[name] = same.get(name, True) and torch.allclose(found, run(whole), rtol=1e-15)
    return same


def _put(own: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    own[...] = weight
    return own


def _lerped(own: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
    torch._foreach_lerp_(own, weights, 0.1)
    return own


def beside_plain() -> tuple[dict[str, bool], str, bool]:
    """Let plain tensors meet a sharded weight; which results are one device's, a refusal, and whether one behind the run is."""
    linear = _sharded()
    weight: Any = linear.weight.detach()
    g = torch.Generator().manual_seed(5)
    noise, mask = torch.randn(5, 3, generator=g, dtype=torch.float64), torch.rand(5, 3, generator=g) > 0.5
    row = torch.arange(1.0, 4.0, dtype=torch.float64)
    cases: dict[str, Any] = {
        "add_": lambda w: w.clone().add_(noise, alpha=2),
        "mul_ of a row": lambda w: w.clone().mul_(row),
        "lerp_": lambda w: w.clone().lerp_(noise, 0.1),
        "copy_": lambda w: w.clone().copy_(noise),
        "masked_fill_": lambda w: w.clone().masked_fill_(mask, 0.0),
        "clamp_": lambda w: w.clone().clamp_(min=-noise.abs()),
        "*": lambda w: w * mask,
        "-": lambda w: noise - w + row,
        ">": lambda w: (w > noise).double(),
        "where": lambda w: w.where(mask, noise),
        "+=": lambda w: w.clone().__iadd__(noise),
        "torch.mul": lambda w: torch.mul(w, mask),
        "torch.where": lambda w: torch.where(mask, w, 0.0),
        "torch.lerp": lambda w: torch.lerp(noise, w, 0.1),
        "torch.masked_fill": lambda w: torch.masked_fill(w, mask, 0.0),
        "torch.addcmul": lambda w: torch.addcmul(w, noise, w, value=2),
        "foreach": lambda w: torch._foreach_mul([w, w], [mask.double(), noise])[1],
        "view(-1)": lambda w: w.view(-1) * 2,
        "numpy": lambda w: torch.from_numpy(w.numpy().copy()),
        "plain.add_": lambda w: noise.clone().add_(w, alpha=2),
        "plain.lerp_": lambda w: noise.clone().lerp_(w, 0.1),
        "plain.copy_": lambda w: noise.clone().copy_(w),
        "plain[...]": lambda w: _put(noise.clone(), w),
        "plain +=": lambda w: noise.clone().__iadd__(w),
        "plain foreach": lambda w: _lerped([noise.clone(), noise.clone()], [w, w])[1],
        "plain out": lambda w: torch.add(w, w, out=noise.clone()),
    }
    same = {}
    whole = weight.full_tensor()
    with used_as_whole(linear):
        for name, run in cases.items():
            found = run(weight)
            same[name] = torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, run(whole))
        refusal = ""
        try:
            weight.add_(noise + torch.distributed.get_rank())
        except SequenceParallelError as error:
            refusal = str(error)
    behind = weight + noise
    return same, refusal, torch.equal(behind.full_tensor(), whole + noise)


def generated() -> tuple[list[bool], list[str]]:
    """Choose tokens by layers that are called as a hook calls them, outside of their unit's forward.

    Returns:
        which results are plain and one device's; the refusals of calls with gradients: of a layer, and of rows that differ between ranks.
    """
    torch.manual_seed(1)
    embedding, head = nn.Embedding(8, 4, dtype=torch.float64), nn.Linear(4, 8, dtype=torch.float64)
    norm, ids = nn.LayerNorm(4, dtype=torch.float64), torch.tensor([[3]])
    within = nn.Sequential(nn.Conv1d(1, 2, 1, dtype=torch.float64), nn.GRU(1, 4, batch_first=True, dtype=torch.float64))
    wanted, found = _greedy(embedding, within, norm, head, ids), []
    root = nn.Sequential(within, norm, head)
    fully_shard(root, mesh=init_device_mesh("cpu", (2,)))
    with used_as_whole(root):
        # An embedding that is whole in its own unit's forward is given tokens that the layers of the root have chosen.
        for one, each in zip(wanted, _greedy(embedding, within, norm, head, ids), strict=True):
            found.append(not isinstance(each, DTensor) and torch.allclose(each, one, rtol=1e-12, atol=0))
        rows = nn.functional.embedding(ids, head.weight)
        rows.square().sum().backward()
        wanted_rows = torch.zeros(8, 4, dtype=torch.float64)
        wanted_rows[3] = 2 * rows.detach()[0, 0]
        found.append(not isinstance(rows, DTensor) and torch.equal(head.weight.grad.full_tensor(), wanted_rows))  # type: ignore[union-attr,operator]
        return found, [
            _refusal(lambda: head(embedding(ids))),
            _refusal(lambda: nn.functional.embedding(_own_ids(), head.weight)),
        ]


def _own_ids() -> torch.Tensor:
    return torch.tensor([1, 2 + torch.distributed.get_rank()])


def _refusal(call: Any) -> str:
    try:
        call()
    except SequenceParallelError as error:
        return str(error)
    return ""


@torch.no_grad()
def _greedy(
    embedding: nn.Module, within: Any, norm: nn.Module, head: nn.Module, ids: torch.Tensor
) -> list[torch.Tensor]:
    found = []
    for _ in range(3):
        mixed = within[0](embedding(ids)).mean(1)[..., None]  # (1, 4, 1)
        logits = head(norm(within[1](mixed)[0] * norm.weight))[:, -1]
        ids = logits.argmax(-1)[:, None]
        found += [mixed, logits, ids]
    return found
