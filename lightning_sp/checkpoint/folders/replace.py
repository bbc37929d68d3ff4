"""One checkpoint in place of another: the name is of a whole one at any moment, and what a stop has left is found again."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from lightning_sp.checkpoint.folders.folder import PARTIAL, REPLACED, is_complete, partial_path, replaced_path
from lightning_sp.checkpoint.folders.writing import end_writing

# fcntl.h and linux/fs.h.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def put_in_place(written: Path, path: Path) -> None:
    """Give what was written its own name, replacing an older checkpoint there, in one step: at any moment the name is of a whole one.

    A folder cannot be renamed over another. Linux exchanges the two names; where the file system does not (NFS), the older one is renamed
    first, and `recover` ends what a stop between the two has left. What is removed is so when the new one is on the disk, its name too.
    """
    _sync(written)
    _replace(written, path)
    end_writing(written)


def _replace(written: Path, path: Path) -> None:
    if path.is_symlink() or not path.exists() or (path.is_file() and written.is_file()):
        written.replace(path)
        _sync_names(path.parent)
        return
    if exchange_names(written, path):
        _sync_names(path.parent)
        _remove(written)
        return
    old = replaced_path(path)
    _remove(old)
    path.rename(old)
    written.rename(path)
    _sync_names(path.parent)
    _remove(old)


def _sync(written: Path) -> None:
    """Wait until a file, or a folder's files and their names, are on the disk."""
    for file in written.iterdir() if written.is_dir() else (written,):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    if written.is_dir():
        _sync_names(written)


def _sync_names(folder: Path) -> None:
    """Wait until a folder's names are on the disk, where its file system can tell."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def recover(path: Path) -> str | None:
    """Give a checkpoint that a save was stopped in replacing its name again; return what was done, None where nothing was to be done.

    Where its name is missing, one of its remnants is whole: the newer one if that was complete, else the older.

    Args:
        path: of the checkpoint, its remnants beside it.
    """
    for remnant in (partial_path(path), replaced_path(path)):
        if not path.exists() and is_complete(remnant):
            remnant.rename(path)
            _remove(replaced_path(path))
            return f"checkpoint {path} is {remnant.name}, which a save that was stopped had left beside it"
    return None


def remnants(folder: Path) -> list[Path]:
    """Return the checkpoints whose names a folder has no more, but remnants of a save that was stopped."""
    if not folder.is_dir():
        return []
    left = (each for each in folder.iterdir() if each.name.endswith((PARTIAL, REPLACED)))
    named = {_named_by(each) for each in left if is_complete(each)}
    return sorted(path for path in named if not path.exists())


def unfinished(folder: Path) -> list[Path]:
    """Return what saves that were stopped have left in a folder, half-written, or replaced and not yet deleted: all but what `recover` renames.

    One that a run beside this is writing is among them.
    """
    if not folder.is_dir():
        return []
    left = (each for each in folder.iterdir() if each.name.endswith((PARTIAL, REPLACED)))
    return sorted(each for each in left if not is_complete(each) or _named_by(each).exists())


def _named_by(remnant: Path) -> Path:
    return remnant.with_name(remnant.name.removesuffix(PARTIAL).removesuffix(REPLACED))


def exchange_names(a: Path, b: Path) -> bool:
    """Exchange two names at one moment; return False where the system or its file system cannot. Source: renameat2(2), Linux 3.15."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(b))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
