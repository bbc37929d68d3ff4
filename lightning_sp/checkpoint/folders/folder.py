"""The folder of a checkpoint on disk: its files, how it becomes whole at one moment, and how damage is found.

    NAME/
      .metadata, __<rank>_0.distcp    torch.distributed.checkpoint: the model's and the optimizers' tensors
      meta.pt                         everything else, plain containers (Lightning's name for it)
      manifest.json                   written last: size and CRC-32 of every file; a folder without it is half-written

It is written as NAME.partial, which takes its name at one moment when complete. A store of objects (s3://...) has no rename:

    NAME/
      save-<one save's>/              the same files; each save has a folder of its own
      manifest.json                   the last object to be written: it says which save the checkpoint is
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from lightning_sp.checkpoint.folders.address import Address, Location
from lightning_sp.checkpoint.folders.writing import end_writing
from lightning_sp.errors import SequenceParallelError, told_error

META, METADATA, MANIFEST, PARTIAL, REPLACED = "meta.pt", ".metadata", "manifest.json", ".partial", ".replaced"
# Of one whole file: Lightning's.
FILE_SUFFIX = ".ckpt"
# Of an object store: what one save's folder begins with.
_MOST_NAMED = 5
SAVE = "save-"
FORMAT = 1
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Contents:
    """What a complete checkpoint's manifest says.

    Args:
        folder: where the files lie.
        files: bytes and CRC-32 of each.
    """

    folder: Location
    files: dict[str, tuple[int, int]]


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path on a local or mounted file system.

    Raises:
        SequenceParallelError: an address elsewhere.
    """
    place = located(path)
    if isinstance(place, str):
        raise SequenceParallelError(
            f"checkpoint path {place!r}: an address is not supported here: copy what lies there to a path that all nodes see, and give that"
        )
    return place


def located(path: str | os.PathLike[str]) -> Path | str:
    """Return a path on a local or mounted file system, or an address (s3://...), which is no path, as it is."""
    text = os.fspath(path)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Path(text)
    return Path(rest) if scheme in ("file", "local") else text


def readable(path: str | os.PathLike[str]) -> Location:
    """Return where a checkpoint is read from.

    Raises:
        SequenceParallelError: an address that fsspec cannot open.
    """
    place = located(path)
    return Address(place) if isinstance(place, str) else place


def folder_at(address: str) -> Address | None:
    """Return a checkpoint's folder in a store, complete or not; None where none is, or where only a plugin of the user's can look."""
    try:
        folder = Address(address)
    except SequenceParallelError:
        return None
    if (folder / MANIFEST).is_file():
        return folder
    return folder if folder.is_dir() and any(each.name.startswith(SAVE) for each in folder.iterdir()) else None


def replaced_path(path: Path) -> Path:
    """Return the path of an older checkpoint while another takes its name."""
    return path.with_name(path.name + REPLACED)


def partial_path(path: Path) -> Path:
    """Return the path of a checkpoint while it is written."""
    return path.with_name(path.name + PARTIAL)


def remove_incomplete(path: Path) -> None:
    """Remove what a save that has failed has written of a checkpoint: by one rank, when all have ended their part.

    What is complete stays: a failure between two renames has left it, and `replace.recover` gives it its name.
    """
    if not (partial_path(path) / MANIFEST).exists():
        shutil.rmtree(partial_path(path), ignore_errors=True)
    end_writing(partial_path(path))


def checksum(file: Location) -> tuple[int, int]:
    """Return a file's bytes and CRC-32."""
    size = crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def write_manifest(folder: Path, files: dict[str, tuple[int, int]]) -> None:
    """Write the manifest, whole or not at all.

    Raises:
        SequenceParallelError: this process does not see a file that another has written.
    """
    _check_seen(folder, files)
    temporary = folder / (MANIFEST + ".tmp")
    with temporary.open("w") as stream:
        json.dump({"format": FORMAT, "files": {name: list(of) for name, of in sorted(files.items())}}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(folder / MANIFEST)


def write_manifest_of_save(folder: Address, save: str, files: dict[str, tuple[int, int]]) -> None:
    """Make one save the checkpoint of that name, at one moment.

    Raises:
        SequenceParallelError: this process does not see an object that another has written.
    """
    _check_seen(folder / save, files)
    listed = {name: list(of) for name, of in sorted(files.items())}
    (folder / MANIFEST).write_bytes(json.dumps({"format": FORMAT, "save": save, "files": listed}).encode())


def _check_seen(folder: Location, files: dict[str, tuple[int, int]]) -> None:
    missing = [
        name
        for name, (size, _) in files.items()
        if not (folder / name).is_file() or (folder / name).stat().st_size != size
    ]
    if missing:
        raise SequenceParallelError(
            f"checkpoint {folder}: rank 0 does not see {len(missing)} of {len(files)} files that other ranks wrote ({missing[0]}, ...): the "
            "folder must be on a file system, or in a store, that all nodes share"
        )


def check_target(path: Path) -> None:
    """Refuse to replace a folder that is no checkpoint.

    Raises:
        SequenceParallelError: with its path.
    """
    if path.is_dir() and not path.is_symlink() and not is_folder_checkpoint(path) and any(path.iterdir()):
        raise SequenceParallelError(
            f"checkpoint {path}: a folder of that name is there and is no checkpoint; it is not overwritten"
        )


def check_target_at(address: Address, *, is_folder: bool) -> None:
    """Refuse to write beside what a load could take for the checkpoint: a store has a file and a folder of one name.

    Raises:
        SequenceParallelError: with its address.
    """
    if is_folder and address.is_file():
        raise SequenceParallelError(
            f"checkpoint {address}: one file of that name is there, and this save is a folder: delete it, or give another name"
        )
    if not is_folder and (address / MANIFEST).is_file():
        raise SequenceParallelError(
            f"checkpoint {address}: a folder of that name is there, and this save is one file: delete it, or give another name"
        )
    others = [each.name for each in address.iterdir()] if is_folder and address.is_dir() else []
    if others and MANIFEST not in others and not all(each.startswith(SAVE) for each in others):
        raise SequenceParallelError(
            f"checkpoint {address}: {len(others)} names are there and are no checkpoint ({sorted(others)[0]}); they are not overwritten"
        )


def is_folder_checkpoint(path: Location) -> bool:
    """Return whether a folder holds a checkpoint, complete or not."""
    return any((path / name).exists() for name in (MANIFEST, META, ".metadata"))


def read_manifest(path: Location) -> Contents:
    """Return what a complete checkpoint folder holds.

    Raises:
        SequenceParallelError: there is none, it is half-written, or of a newer format.
    """
    _check_manifest_there(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        number = manifest["format"]
        files = {name: (int(size), int(crc)) for name, (size, crc) in manifest["files"].items()}
        save = str(manifest.get("save", ""))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SequenceParallelError(f"checkpoint {path} is damaged: {MANIFEST} cannot be read ({error})") from error
    if number != FORMAT:
        raise SequenceParallelError(
            f"checkpoint {path} is of format {number}, this version of lightning_sp reads {FORMAT}"
        )
    if save:
        check_name(path, save)
    folder = path / save if save else path
    _check_listed(folder, files)
    return Contents(folder, files)


def _check_manifest_there(path: Location) -> None:
    if not path.exists():
        partial = partial_path(path) if isinstance(path, Path) else None
        if partial is not None and partial.is_dir():
            found = len(list(partial.iterdir()))
            raise SequenceParallelError(
                f"checkpoint {path} was never completed: {partial.name} holds {found} files of a save that did not end; resume from an earlier "
                f"checkpoint, and delete {partial}"
            )
        raise SequenceParallelError(f"checkpoint {path} does not exist")
    if isinstance(path, Path) and not path.is_dir():
        raise SequenceParallelError(f"{path} is no checkpoint: it is neither a folder nor a plain file")
    if (path / MANIFEST).is_file():
        return
    names = [each.name for each in path.iterdir()] if path.is_dir() else []
    if is_folder_checkpoint(path) or any(each.endswith(".distcp") or each.startswith(SAVE) for each in names):
        raise SequenceParallelError(
            f"checkpoint {path} is half-written: it holds {len(names)} files and no {MANIFEST}, which a save writes last (or "
            "it is a distributed checkpoint of another strategy); resume from an earlier checkpoint"
        )
    inside = sorted(name for name in names if (path / name / MANIFEST).is_file() or name.endswith(".ckpt"))
    give = f"; give one of those below it: {', '.join(inside[:_MOST_NAMED])}" if inside else ""
    raise SequenceParallelError(f"{path} is a folder without a checkpoint in it (no {MANIFEST}){give}")


def _check_listed(path: Location, files: dict[str, tuple[int, int]]) -> None:
    """Refuse a manifest that does not list what a save writes, and files that it does not list."""
    for name in files:
        check_name(path, name)
    if missing := [name for name in (META, METADATA) if name not in files]:
        raise SequenceParallelError(
            f"checkpoint {path} is damaged: its manifest lists {len(files)} files and no {missing[0]}; resume from another checkpoint"
        )
    # What systems leave in folders of their own accord has a hidden name.
    others = [each.name for each in path.iterdir() if each.name not in (*files, MANIFEST) and each.name[0] != "."]
    if others:
        raise SequenceParallelError(
            f"checkpoint {path} holds {len(others)} files that its manifest does not list ({sorted(others)[0]}): it is not as it was written; "
            "move them elsewhere, or resume from another checkpoint"
        )


def check_name(folder: Location, name: str) -> None:
    """Refuse a manifest's entry that is not a plain file of the folder itself.

    Raises:
        SequenceParallelError: a path, an absolute one or one of a parent among them, or a symbolic link.
    """
    if not name or name != PurePath(name).name or name in (".", "..") or "\\" in name or "\0" in name:
        raise SequenceParallelError(
            f"checkpoint {folder}: its manifest lists {name!r}: files lie in the folder itself; resume from another checkpoint"
        )
    if (folder / name).is_symlink():
        raise SequenceParallelError(
            f"checkpoint {folder}: {name} is a symbolic link, which may lead anywhere: it is not opened; put the file itself there"
        )


def is_complete(path: Location) -> bool:
    """Return whether a folder holds a checkpoint with all its files, by its manifest."""
    try:
        found = read_manifest(path)
    except SequenceParallelError:
        return False
    at = found.folder
    return all((at / name).is_file() and (at / name).stat().st_size == size for name, (size, _) in found.files.items())


def damage(contents: Contents, names: Iterable[str]) -> str | None:
    """Return what is wrong with some of a checkpoint's files, None if nothing."""
    path, files = contents.folder, contents.files
    for name in names:
        size, crc = files[name]
        if not (path / name).is_file():
            return f"checkpoint {path} is damaged: {name} ({size} bytes) is missing; resume from another checkpoint"
        found = (path / name).stat().st_size
        if found != size:
            return f"checkpoint {path} is damaged: {name} has {found} bytes, {size} were written; resume from another checkpoint"
        if checksum(path / name)[1] != crc:
            return f"checkpoint {path} is damaged: the checksum of {name} ({size} bytes) is not the one written; resume from another checkpoint"
    return None


def first_failure(error: BaseException) -> str:
    """Return the first rank's failure of a collective save or load of torch.distributed.checkpoint."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = min(failures.items(), key=lambda item: int(item[0]))
        return f"rank {rank}: {told_error(cause)}"
    return told_error(error)
