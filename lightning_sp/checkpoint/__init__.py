"""Checkpoints: a DCP directory that is the same for every mesh, or one whole file; resumed on any degrees, exported for one process."""

from lightning_sp.checkpoint.background import BackgroundSaves
from lightning_sp.checkpoint.contents.check import check_optimizers, loads_by_own_rules
from lightning_sp.checkpoint.contents.containers import restore_containers
from lightning_sp.checkpoint.contents.frozen import (
    EXCLUDED,
    exclude_frozen,
    exclude_quantized,
    include_frozen_of_whole,
    is_built_noted,
    note_built,
)
from lightning_sp.checkpoint.contents.plain import AS_TEXT
from lightning_sp.checkpoint.contents.random_state import derived_seed, random_state, restore_random_state
from lightning_sp.checkpoint.contents.state import (
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    sharded_like,
    sharded_state,
    whole_state_dict,
)
from lightning_sp.checkpoint.export import export_checkpoint, is_checkpoint_folder, read_checkpoint_folder
from lightning_sp.checkpoint.folders.address import Address
from lightning_sp.checkpoint.folders.expired import remove_expired
from lightning_sp.checkpoint.folders.folder import located
from lightning_sp.checkpoint.folders.latest import latest_checkpoint
from lightning_sp.checkpoint.folders.replace import recover, remnants, unfinished
from lightning_sp.checkpoint.host_memory import available_bytes
from lightning_sp.checkpoint.load import check_adapted, load_checkpoint
from lightning_sp.checkpoint.save import save_checkpoint
from lightning_sp.checkpoint.staged_folder import staged_bytes

__all__ = [
    "AS_TEXT",
    "EXCLUDED",
    "Address",
    "BackgroundSaves",
    "available_bytes",
    "check_adapted",
    "check_optimizers",
    "derived_seed",
    "exclude_frozen",
    "exclude_quantized",
    "export_checkpoint",
    "include_frozen_of_whole",
    "is_built_noted",
    "is_checkpoint_folder",
    "latest_checkpoint",
    "load_checkpoint",
    "load_model_state",
    "load_optimizer_state",
    "loads_by_own_rules",
    "located",
    "model_state",
    "note_built",
    "optimizer_state",
    "random_state",
    "read_checkpoint_folder",
    "recover",
    "remnants",
    "remove_expired",
    "restore_containers",
    "restore_random_state",
    "save_checkpoint",
    "sharded_like",
    "sharded_state",
    "staged_bytes",
    "unfinished",
    "whole_state_dict",
]
