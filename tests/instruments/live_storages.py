"""The most bytes of tensors that are alive at once, from the tensors themselves: what else a process does is not in it.

Resident memory is no measure in a process that ran other tests: a tensor that malloc serves from what they have left in the heap stays
resident once it is freed, and tensors of another size are mapped beside it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lightning_sp.global_view.tensors.deferred import DeferredTensor


class LiveStorages(TorchDispatchMode):
    """Counts within its block what operators of this thread give and are given, its backwards included, but not what is alive before it.

    Args:
        before: tensors that are alive before.

    Attributes:
        peak_bytes: the most at once, after any operator.
        largest_bytes: the most of one tensor.
    """

    def __init__(self, before: list[Tensor]) -> None:
        super().__init__()
        self.peak_bytes = self.largest_bytes = 0
        self._before = {each.untyped_storage()._cdata for each in before}
        self._alive = WeakIdKeyDictionary()
        self._lock = threading.Lock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count((args, kwargs, result))
        return result

    def count(self, tensors: Any) -> None:
        """Count what another thread has made, too."""
        with self._lock:
            for each in tree_leaves(tensors):
                each = each._local_tensor if isinstance(each, DTensor) else each
                if not isinstance(each, torch.Tensor) or each.is_meta or isinstance(each, DeferredTensor):
                    continue  # no memory
                if each.untyped_storage()._cdata not in self._before:
                    self._alive[each.untyped_storage()] = None
                    self.largest_bytes = max(self.largest_bytes, each.untyped_storage().nbytes())
            self.peak_bytes = max(self.peak_bytes, sum(each.nbytes() for each in list(self._alive)))
