"""The newest complete checkpoint of a folder: what a script that starts itself again goes on from."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_sp.checkpoint.folders.address import Address
from lightning_sp.checkpoint.folders.folder import FILE_SUFFIX, MANIFEST, PARTIAL, REPLACED, is_complete, located
from lightning_sp.checkpoint.folders.replace import recover, remnants


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | str | None:
    """Return the newest complete checkpoint below a folder, None where there is none: `fit(ckpt_path=latest_checkpoint("runs"))`.

    A folder of ours is complete by its manifest, and as new as that; a file of Lightning's (`.ckpt`) as it stands, for a store shows an object
    when it is whole. One that is half-written is passed over; one that a stopped save has left without its name has it again.

    Args:
        folder: with checkpoints at any depth; or an address (s3://...): the newest there, by its store's clock, as an address.
    """
    root = located(folder)
    if isinstance(root, str):
        return _newest(written_at(Address(root)))
    for inside in [root, *(each for each in root.rglob("*") if each.is_dir())]:
        for path in remnants(inside):
            recover(path)
    found = [each.parent for each in root.rglob(MANIFEST) if _is_named(each.parent) and is_complete(each.parent)]
    found += [each for each in root.rglob("*.ckpt") if each.is_file() and not each.is_symlink()]
    written = {path: when for path in found if (when := _written(path)) is not None}
    return max(written, key=lambda path: (written[path], str(path)), default=None)


def _newest(written: dict[Address, float]) -> str | None:
    newest = max(written, key=lambda each: (written[each], str(each)), default=None)
    return None if newest is None else str(newest)


def written_at(root: Address) -> dict[Address, float]:
    """Return the complete checkpoints below an address, and when each was written."""
    objects = list(root.objects())
    folders = [each.parent for each in objects if each.name == MANIFEST]
    written = {each: (each / MANIFEST).stat().st_mtime for each in folders if is_complete(each)}
    return {**written, **{each: each.stat().st_mtime for each in objects if each.name.endswith(FILE_SUFFIX)}}


def _is_named(path: Path) -> bool:
    return not path.name.endswith((PARTIAL, REPLACED))


def _written(path: Path) -> float | None:
    """Return when a checkpoint was written; None for one that a run beside this has deleted since."""
    try:
        return (path / MANIFEST if path.is_dir() else path).stat().st_mtime
    except FileNotFoundError:
        return None
