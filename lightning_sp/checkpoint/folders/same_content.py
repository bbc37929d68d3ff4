"""Whether all ranks read one and the same checkpoint: a host may have another one, of an earlier run, under its name.

Each rank reads its own part of the weights. Of two checkpoints a model would be of both, and nobody would notice.
"""

from __future__ import annotations

import socket
import zipfile
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.checkpoint.folders.address import Location
from lightning_sp.checkpoint.folders.folder import Contents
from lightning_sp.errors import SequenceParallelError


def check_same_content(path: Location | str, contents: Contents | None, group: ProcessGroup | None) -> None:
    """Refuse a checkpoint of which hosts have different ones. Every rank must call it.

    Args:
        path: as it was given.
        contents: what the manifest of a folder says; None where it is one file, or a plugin's.
        group: the world, on a backend for host objects.

    Communicates: one all_reduce of 16 bytes.

    Raises:
        SequenceParallelError: with the digests and their hosts.
    """
    own = _digest(path, contents)
    if comm.all_equal(torch.tensor([own]), group):
        return
    found = {"what is there": f"of digest {own:014x} (host {socket.gethostname()})"}
    raise SequenceParallelError(
        f"checkpoint {path} is not the same on all ranks: {comm.told_differences(comm.gather_objects(found, group))}: each would read its part "
        "of another model; keep checkpoints on a file system that all hosts see, or copy this one to each of them"
    )


def _digest(path: Location | str, contents: Contents | None) -> int:
    """Return a number that tells what a rank is about to read, 0 where that is not known: by checksums that are written there."""
    if contents is not None:
        return comm.digest_of(contents.files)
    if not isinstance(path, Path) or not path.is_file():
        return 0
    try:
        with zipfile.ZipFile(path) as archive:  # torch's format has a checksum of each record in its index
            return comm.digest_of({each.filename: (each.file_size, each.CRC) for each in archive.infolist()})
    except (OSError, zipfile.BadZipFile):
        return comm.digest_of({"bytes": path.stat().st_size})
