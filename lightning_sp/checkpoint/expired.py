"""Checkpoints that have become too old: which of a folder they are, and how they go."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from lightning_sp.checkpoint.folder import MANIFEST, PARTIAL, REPLACED, is_complete, located

FILE_SUFFIX = ".ckpt"


def remove_expired(folder: str, max_age: timedelta, keep: Iterable[str]) -> list[str]:
    """Remove the checkpoints that lie in a folder itself and are older than its newest complete one by more than an age.

    The newest complete one stays, whatever its age. What is half-written is neither counted nor touched: a save may be writing it. Ages are
    those of the file system's clock: a rank's own may differ from it.

    Args:
        folder: a path, or an address (s3://...).
        max_age: of what stays, before the newest.
        keep: checkpoints that stay in any case.

    Returns:
        What went, the oldest first.

    Raises:
        OSError: one could not be removed.
    """
    place = located(folder)
    if isinstance(place, Path):
        kept = {Path(each).resolve() for each in keep}
        expired = [path for path in _older(_complete(place), max_age) if path.resolve() not in kept]
        for path in expired:
            _remove(path)
        return [str(path) for path in expired]
    files, root = url_to_fs(place)
    kept_names = {files._strip_protocol(each) for each in keep}
    names = [each for each in files.find(root, maxdepth=1) if each.endswith(FILE_SUFFIX)] if files.exists(root) else []
    dates = {each: files.modified(each).timestamp() for each in names}
    gone = [each for each in _older(dates, max_age) if each not in kept_names]
    for each in gone:
        files.rm(each)
    return [str(files.unstrip_protocol(each)) for each in gone]


def _older(written: Mapping[Any, float], max_age: timedelta) -> list[Any]:
    newest = max(written.values(), default=0.0)
    return sorted(
        (each for each, when in written.items() if newest - when > max_age.total_seconds()), key=written.__getitem__
    )


def _complete(folder: Path) -> dict[Path, float]:
    """Return a folder's complete checkpoints, and when each was written. What a link leads to is left out, as the link is."""
    if not folder.is_dir():
        return {}
    inside = list(folder.iterdir())
    linked = {each.resolve() for each in inside if each.is_symlink()}
    found: dict[Path, float] = {}
    for each in inside:
        if each.is_symlink() or each.resolve() in linked or each.name.endswith((PARTIAL, REPLACED)):
            continue
        if each.is_file() and each.suffix == FILE_SUFFIX:
            found[each] = each.stat().st_mtime
        elif each.is_dir() and is_complete(each):
            found[each] = (each / MANIFEST).stat().st_mtime
    return found


def _remove(path: Path) -> None:
    if path.is_file():
        path.unlink()
        return
    # First what makes it whole: where this is stopped, nobody takes the rest for a checkpoint.
    (path / MANIFEST).unlink()
    shutil.rmtree(path)
