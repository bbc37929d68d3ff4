"""One process at a time writes a checkpoint: a script that was started twice would write into its own files, and their mixture be whole.

    run 1    x.ckpt.partial/__0_0.distcp .......................... checksums, manifest, x.ckpt
    run 2                                 __0_0.distcp once more

What is written is locked while it is. The kernel lets go when the process ends, by whatever signal. Where a file system has no locks, nothing is
known of others.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from lightning_sp.errors import SequenceParallelError

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None  # type: ignore[assignment]

# By the process and what it writes, the descriptor that holds its lock: a process that was forked has a copy of these, and no lock.
_held: dict[tuple[int, Path], int] = {}


def begin_folder(staging: Path) -> None:
    """Make an empty folder that this process alone writes, in the place of what a save that was stopped has left.

    Raises:
        SequenceParallelError: another process writes it.
        OSError: it cannot be made.
    """
    end_writing(staging)
    if staging.exists():
        descriptor = _locked(staging)
        try:
            shutil.rmtree(staging, ignore_errors=True)
        finally:
            os.close(descriptor)
    staging.mkdir(parents=True)
    _held[os.getpid(), staging] = _locked(staging)


def begin_file(staging: Path) -> None:
    """Hold a file that this process alone writes. As `begin_folder`."""
    end_writing(staging)
    staging.parent.mkdir(parents=True, exist_ok=True)
    staging.touch()
    _held[os.getpid(), staging] = _locked(staging)


def end_writing(staging: Path) -> None:
    """Let others write it: it has its own name, or is gone."""
    if (descriptor := _held.pop((os.getpid(), staging), None)) is not None:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a loader's worker may have a copy of the descriptor
        os.close(descriptor)


def _locked(path: Path) -> int:
    """Return a descriptor that holds a file's or folder's lock."""
    descriptor = os.open(path, os.O_RDONLY)
    is_other = False
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_other = True
    except OSError:  # a file system without locks
        pass
    with suppress(FileNotFoundError):
        if not is_other and os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    os.close(descriptor)
    raise SequenceParallelError(
        f"{path} is being written by another process: two runs write one folder, and their files would mix; end the other run (a script that "
        "was started twice, a job that was queued again beside itself), or give each ModelCheckpoint a dirpath of its own"
    )
