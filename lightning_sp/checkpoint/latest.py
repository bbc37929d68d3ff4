"""The newest complete checkpoint of a folder: what a script that starts itself again goes on from."""

from __future__ import annotations

import os
from pathlib import Path

from fsspec.core import url_to_fs

from lightning_sp.checkpoint.folder import MANIFEST, PARTIAL, REPLACED, is_complete, located
from lightning_sp.checkpoint.replace import recover, remnants


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | str | None:
    """Return the newest complete checkpoint below a folder, None where there is none: `fit(ckpt_path=latest_checkpoint("runs"))`.

    A folder of ours is complete by its manifest, and as new as that; a file of Lightning's (`.ckpt`) as it stands. One that is half-written is
    passed over; one that a stopped save has left without its name has it again.

    Args:
        folder: with checkpoints at any depth; or an address (s3://...), which has files alone: the newest, by its store's clock, as an address.
    """
    root = located(folder)
    if isinstance(root, str):
        return _latest_at(root)
    for inside in [root, *(each for each in root.rglob("*") if each.is_dir())]:
        for path in remnants(inside):
            recover(path)
    found = [each.parent for each in root.rglob(MANIFEST) if _is_named(each.parent) and is_complete(each.parent)]
    found += [each for each in root.rglob("*.ckpt") if each.is_file() and not each.is_symlink()]
    written = {path: when for path in found if (when := _written(path)) is not None}
    return max(written, key=lambda path: (written[path], str(path)), default=None)


def _latest_at(address: str) -> str | None:
    """Return the address of the newest checkpoint below another; a store shows a file when it is whole."""
    files, root = url_to_fs(address)
    found = [each for each in files.find(root) if each.endswith(".ckpt")] if files.exists(root) else []
    newest = max(found, key=lambda each: (files.modified(each), each), default=None)
    return None if newest is None else str(files.unstrip_protocol(newest))


def _is_named(path: Path) -> bool:
    return not path.name.endswith((PARTIAL, REPLACED))


def _written(path: Path) -> float | None:
    """Return when a checkpoint was written; None for one that a run beside this has deleted since."""
    try:
        return (path / MANIFEST if path.is_dir() else path).stat().st_mtime
    except FileNotFoundError:
        return None
