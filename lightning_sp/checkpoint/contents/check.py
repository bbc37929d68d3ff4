"""Refusing a checkpoint of another model, or of other optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_sp.errors import SequenceParallelError
from lightning_sp.parameter_names import shown

STATE_PREFIX = "state_dict."
# Whose modules load what they have saved.
_LIBRARIES = ("torch", "lightning", "lightning_sp", "torchmetrics")


def stored_shapes(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's tensors in a checkpoint folder."""
    return {
        key[len(STATE_PREFIX) :]: tuple(value.size)
        for key, value in metadata.state_dict_metadata.items()
        if key.startswith(STATE_PREFIX) and isinstance(value, TensorStorageMetadata)
    }


def check_model(path: Path | str, stored: Mapping[str, Any], own: Mapping[str, Any], *, strict: bool) -> None:
    """Refuse a checkpoint of another model, with counts and the first names; what a lenient load leaves out is said."""
    # A folder holds a single number as FSDP2 has it.
    differs = [n for n in own if n in stored and stored[n] != own[n] and (own[n], stored[n]) != ((), (1,))]
    differing = [f"{n} is {stored[n]} there and {own[n]} here" for n in differs]
    only_own = [name for name in own if name not in stored]
    only_stored = [name for name in stored if name not in own]
    parts, unmatched = [], []
    if differing:
        parts.append(f"{len(differing)} of {len(own)} tensors differ in shape ({shown(differing, '; ')})")
    if only_own:
        unmatched.append(f"{len(only_own)} are only in this model ({shown(only_own)})")
    if only_stored:
        unmatched.append(f"{len(only_stored)} are only in the checkpoint ({shown(only_stored)})")
    if unmatched and not strict:
        rank_zero_warn(
            f"sequence_parallel: strict_loading=False: of checkpoint {path} {'; '.join(unmatched)}: these are not loaded"
        )
    parts += unmatched if strict else []
    if parts:
        fix = "" if differing else ", or set strict_loading=False on the LightningModule"
        raise SequenceParallelError(
            f"checkpoint {path} is of another model: {'; '.join(parts)}; build the model with the options it was trained with{fix}"
        )


def loads_by_own_rules(module: nn.Module) -> bool:
    """Return whether code of the user's changes a state on its way into the module: another `load_state_dict`, or hooks of it."""
    for each in module.modules():
        hooks = (*each._load_state_dict_pre_hooks.values(), *each._load_state_dict_post_hooks.values())
        methods = (type(each).load_state_dict, type(each)._load_from_state_dict)
        if any(str(getattr(of, "__module__", "")).partition(".")[0] not in _LIBRARIES for of in (*hooks, *methods)):
            return True
    return False


def check_optimizers(path: Path | str, checkpoint: Mapping[str, Any], count: int | None = None) -> None:
    """Refuse a checkpoint without optimizers' state, or of another number of them than there are."""
    if "optimizer_states" not in checkpoint:
        raise SequenceParallelError(
            f"checkpoint {path} holds weights alone (save_weights_only=True), and fit(ckpt_path=...) needs the optimizers' state: give another "
            "checkpoint, or export it and load the weights into the model"
        )
    stored = len(checkpoint["optimizer_states"])
    if count is not None and stored != count:
        raise SequenceParallelError(
            f"checkpoint {path} holds the state of {stored} optimizers, configure_optimizers returned {count} in this run: return the same"
        )
