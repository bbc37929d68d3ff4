"""Whether a checkpoint has room, asked before a byte of it is written."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_sp.errors import SequenceParallelError

GIB = 2**30


def check_free_space(path: Path, tensors: Any) -> None:
    """Refuse to begin a checkpoint that its file system has no room for: what it is to replace stays until it is whole.

    Args:
        path: of the checkpoint.
        tensors: all that it will hold, in any containers; sharded ones count whole.

    Raises:
        SequenceParallelError: with both numbers.
    """
    needed = stored_bytes(tree_leaves(tensors))
    there = next(each for each in (path.parent, *path.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise SequenceParallelError(
            f"checkpoint {path} needs {needed:,} bytes ({needed / GIB:.2f} GiB), and its file system has {free:,} free: nothing was "
            "written; delete older ones, keep fewer (ModelCheckpoint(save_top_k=...)), or write less (save_weights_only=True)"
        )


def stored_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of tensors' elements, of sharded ones of all ranks."""
    return sum(each.numel() * each.element_size() for each in values if isinstance(each, Tensor))
