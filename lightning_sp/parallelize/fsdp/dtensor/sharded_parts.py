"""Writes to a part of a sharded tensor, `weight[0].zero_()` or `gradient[:10] = 0`, that reach the tensor; and random numbers of all of it.

A row or a slice along the sharded dim is a view on one device. Of a DTensor it is a gathered copy: what is written to it was lost without a
word. Here the write is made to the copy and brought home: the tensor is gathered, its part is set, and each rank keeps its shard.

Of random numbers DTensor draws each shard's from its rank's stream: after one seed for all, each shard would hold the same, and otherwise
replicas would differ. Here the first rank draws the whole's and gives each rank its shard: those of one device after the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from lightning_sp.parallelize.fsdp.dtensor.behind_runs import together
from lightning_sp.parallelize.fsdp.dtensor.plain_operands import check_alike

_ATEN = torch.ops.aten
PART_OPS = (
    _ATEN.select.int,
    _ATEN.slice.Tensor,
    _ATEN.split.Tensor,
    _ATEN.split_with_sizes.default,
    _ATEN.unbind.int,
    _ATEN.diagonal.default,
    _ATEN.view.default,
)
RANDOM_OPS = (_ATEN.randn_like.default, _ATEN.rand_like.default, _ATEN.bernoulli.default)
_RANDOM = {"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"}
# Which DTensor writes to a shard as if it were the whole, or makes it another one's, or refuses: written to the whole here.
_ON_WHOLE = {
    *(
        "index_fill_",
        "index_add_",
        "index_copy_",
        "index_put_",
        "index_reduce_",
        "put_",
        "scatter_",
        "scatter_add_",
        "scatter_reduce_",
    ),
    *(
        "masked_scatter_",
        "fill_diagonal_",
        "tril_",
        "triu_",
        "renorm_",
        "addr_",
        "addmm_",
        "addmv_",
        "addbmm_",
        "baddbmm_",
    ),
}
_DUNDERS = (
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__ifloordiv__",
    "__imod__",
    "__iand__",
    "__ior__",
    "__ixor__",
    "__ipow__",
)
# Whose name ends as of those that write, and that write no elements.
_NO_WRITES = {"requires_grad_", "share_memory_", "rename_"}
_WRITES = [
    name
    for name in dir(Tensor)
    if (name.endswith("_") and not name.startswith("_") and name not in _NO_WRITES) or name in _DUNDERS
]


class _Home(NamedTuple):
    """Where a part is from: which output of which operation on what."""

    tensor: DTensor
    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: int | None


def part(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
    """Take a part of a sharded tensor, and note where it is from if it is a copy.

    Args:
        op_call: one of `PART_OPS`.
        args: of it, the tensor first.
        kwargs: of it.
        run: makes the part as torch does.
    """
    tensor = args[0]
    try:
        result = run(*args, **kwargs)
    except RuntimeError:  # `unbind` of what is sharded along that dim is not defined, nor `view(-1)` of uneven shards
        result = run(_replicated(tensor), *args[1:], **kwargs)
    for index, each in enumerate(result) if isinstance(result, (list, tuple)) else [(None, result)]:
        if not isinstance(each, DTensor):
            continue
        if _storage(each) != _storage(tensor) or hasattr(tensor, "_home"):  # or a part of such a copy
            each._home = _Home(tensor, op_call, args[1:], kwargs, index)  # type: ignore[attr-defined]
    return result


def writing_methods() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the methods of DTensor that write, by name, as they are while a run is in progress."""
    for name in _WRITES:
        if callable(original := getattr(Tensor, name, None)):
            made = _drawing if name in _RANDOM else _writing_whole if name in _ON_WHOLE else _writing
            yield name, made(original)
    yield "__setitem__", _set_item
    yield "detach", detach


def _writing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def write(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _bring_home(self)
        return result

    return write


def _writing_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def write(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        for each in (*args, *kwargs.values()):
            if isinstance(each, Tensor) and not isinstance(each, DTensor):
                check_alike(each, self)
        with torch.no_grad():
            whole = _whole(self)
            original(whole, *(_plain(each) for each in args), **{name: _plain(each) for name, each in kwargs.items()})
            _keep_shard(self, whole)
        _bring_home(self)
        return self

    return write


def detach(tensor: DTensor) -> DTensor:
    """Return a sharded tensor without its history.

    A write to it, or to its part, counts as one to the tensor: `step/agreement/agreed_writes.py`.
    """
    found: DTensor = Tensor.detach(tensor)  # type: ignore[assignment]
    if isinstance(found, DTensor):
        found._local_tensor = tensor._local_tensor.detach()
    return found


def _drawing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def draw(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        with torch.no_grad():
            whole = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            original(whole, *(_plain(each) for each in args), **kwargs)
            self._local_tensor.copy_(_of_first(whole, self)._local_tensor)
        _bring_home(self)
        return self

    return draw


def random(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Draw random numbers like a sharded tensor: the whole's, of which each rank keeps its shard. As one of `RANDOM_OPS`."""
    like: DTensor = args[0]
    whole = (
        _whole(like)
        if op_call is _ATEN.bernoulli.default
        else torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    )
    drawn = op_call(whole, *args[1:], **kwargs)
    return _of_first(drawn, like)


def _of_first(whole: Tensor, like: DTensor) -> DTensor:
    return distribute_tensor(whole, like.device_mesh, like.placements)


def _set_item(tensor: DTensor, index: Any, value: Any) -> None:
    """As of a tensor on one device. Every rank must call it. Communicates: one all_gather of the tensor."""
    with torch.no_grad():
        whole = together(_whole, tensor)
        whole[_plain(index)] = _plain(value)
        _keep_shard(tensor, whole)
    _bring_home(tensor)


def _bring_home(written: DTensor) -> None:
    """Write to the tensor that a part is from what the part has become; and to that one's, if it is a part itself."""
    home: _Home | None = getattr(written, "_home", None)
    if home is None:
        return
    with torch.no_grad():
        whole = together(_whole, home.tensor)
        found = home.op(whole, *home.args, **home.kwargs)
        (found if home.output is None else found[home.output]).copy_(_whole(written))
        _keep_shard(home.tensor, whole)
    _bring_home(home.tensor)


def _keep_shard(tensor: DTensor, whole: Tensor) -> None:
    # src_data_rank=None: every rank holds the whole and keeps its part.
    shard = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor._local_tensor.copy_(shard._local_tensor)


def _replicated(tensor: DTensor) -> DTensor:
    """Return a tensor whole on every rank. Within a dispatch, where torch 2.11's own `redistribute` fails, an autograd function."""
    placements = (Replicate(),) * tensor.device_mesh.ndim
    spec = DTensorSpec(tensor.device_mesh, placements, tensor_meta=tensor._spec.tensor_meta)
    local = redistribute_local_tensor(tensor._local_tensor, tensor._spec, spec)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _whole(tensor: DTensor) -> Tensor:
    whole: Tensor = tensor.full_tensor()
    return whole.detach().clone()


def _plain(value: Any) -> Any:
    """Return what an index or a value holds with its sharded tensors whole."""
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(each) for each in value)
    return _whole(value) if isinstance(value, DTensor) else value


def _storage(tensor: DTensor) -> int:
    return tensor._local_tensor.untyped_storage().data_ptr()
