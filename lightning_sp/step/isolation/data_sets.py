"""Data sets and data modules of the user's, and samplers of torch's: a step may write a table into them, by which samples are weighed or drawn.

    self.trainer.train_dataloader.dataset.loss_of_row[batch["row"]] = loss.detach()      numbers of a rank's part, read in the next epoch
    self.sampler.weights[batch["row"]] = loss.detach()                                   of a WeightedRandomSampler

What they hold of samples is left as it is: there may be many, and a stream's are read by threads of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Sampler

from lightning_sp.users_code.ownership import is_class_of_user, key_text

# A table of a number for each of 2 million samples. What is larger is their tokens.
MAX_TABLE_BYTES = 1 << 24
# Longer lists and dicts are samples, or an index of them: of tensors, and of numbers.
_MOST_TABLES, _MOST_NUMBERS = 64, 10_000
_CONTAINERS = (dict, list, deque, tuple)


def is_data_set(value: Any) -> bool:
    """Return whether a value is a data set of the user's own whose samples have numbers, no stream, or a sampler of torch's own class."""
    if isinstance(value, Sampler):
        return type(value).__module__.partition(".")[0] == "torch"
    return isinstance(value, Dataset) and not isinstance(value, IterableDataset) and is_class_of_user(type(value))


def data_of_run(trainer: Any) -> list[Any]:
    """Return the data module and the data sets of training that are of the user's classes, and torch's samplers.

    Args:
        trainer: None outside of a run.
    """
    if trainer is None:
        return []
    module, loaders = getattr(trainer, "datamodule", None), trainer.fit_loop._combined_loader
    found = [module] if module is not None and is_class_of_user(type(module)) else []
    flat = loaders.flattened if loaders is not None else ()
    waiting = [getattr(each, name, None) for each in flat for name in ("dataset", "sampler", "batch_sampler")]
    seen: set[int] = set()
    for each in waiting:  # which grows
        if isinstance(each, (Dataset, Sampler)) and id(each) not in seen:
            seen.add(id(each))
            found += [each] if is_data_set(each) else []
            own = getattr(each, "__dict__", {}).values()  # of one around others: torch's, the user's, ours
            waiting += chain(own, *(v for v in own if isinstance(v, (list, tuple)) and len(v) <= _MOST_TABLES))
    return found


def orders_of_run(trainer: Any) -> list[Any]:
    """Return the samplers, batch samplers and collate functions of training that are objects of the user's classes.

    Args:
        trainer: None outside of a run.
    """
    loaders = None if trainer is None else trainer.fit_loop._combined_loader
    flat = loaders.flattened if loaders is not None else ()
    held = [getattr(each, name, None) for each in flat for name in ("sampler", "batch_sampler", "collate_fn")]
    own = [getattr(each, "__dict__", {}).get("stood_for", each) for each in held]  # what one of ours stands for
    return [each for each in own if not isinstance(each, Dataset) and is_class_of_user(type(each))]


def tables_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a data set or data module holds that may be a table: tensors and arrays that are small, lists, dicts and numbers.

    Args:
        owner: of `data_of_run` or `orders_of_run`, or for which `is_data_set` is true.
    """
    for name, value in getattr(owner, "__dict__", {}).items():
        if name == "data_source" and isinstance(owner, Sampler):
            continue
        if _may_be_table(value):
            yield name, value
        if isinstance(value, _CONTAINERS) and len(value) <= _MOST_TABLES:
            for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if _may_be_table(each):
                    yield f"{name}[{key_text(key)}]", each


def _may_be_table(value: Any) -> bool:
    if isinstance(value, (Tensor, np.ndarray)):
        return not isinstance(value, (nn.Parameter, np.memmap)) and value.nbytes <= MAX_TABLE_BYTES
    return isinstance(value, (int, float)) or (isinstance(value, _CONTAINERS) and len(value) <= _MOST_NUMBERS)
