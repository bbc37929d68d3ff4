"""Checkpoints that have become too old: which of a folder they are, and how they go."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_sp.checkpoint.folders.address import Address
from lightning_sp.checkpoint.folders.folder import FILE_SUFFIX, MANIFEST, PARTIAL, REPLACED, is_complete, located
from lightning_sp.checkpoint.folders.latest import written_at


def remove_expired(
    folder: str, max_age: timedelta, keep: Iterable[str], may_go: Callable[[str], bool] = lambda name: True
) -> list[str]:
    """Remove the checkpoints that lie in a folder itself and are older than its newest complete one by more than an age.

    The newest complete one stays, whatever its age. What is half-written is neither counted nor touched: a save may be writing it. Ages are
    those of the file system's clock: a rank's own may differ from it.

    Args:
        folder: a path, or an address (s3://...).
        max_age: of what stays, before the newest.
        keep: checkpoints that stay in any case.
        may_go: whether one of a name may be removed.

    Returns:
        What went, the oldest first.

    Raises:
        OSError: one could not be removed.
    """
    place = located(folder)
    if isinstance(place, Path):
        kept = {Path(each).resolve() for each in keep}
        expired = [
            path for path in _older(_complete(place), max_age) if may_go(path.name) and path.resolve() not in kept
        ]
        for path in expired:
            _remove(path)
        return [str(path) for path in expired]
    root = Address(place)
    stays = {Address(each) for each in keep}
    inside = {each: when for each, when in written_at(root).items() if each.parent == root}
    gone = [each for each in _older(inside, max_age) if may_go(each.name) and each not in stays]
    for each in gone:
        (each / MANIFEST).remove()
        each.remove()
    return [str(each) for each in gone]


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
