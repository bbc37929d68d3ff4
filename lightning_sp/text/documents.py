"""Text on disk -> documents, one at a time.

    a text file            one document, named by its path below the source's folder
    x.jsonl                one document a line, from one field, named x.jsonl:LINE
    x.parquet              one document a row, from one column, named x.parquet:ROW (needs the `parquet` extra)
    "stdlib"               the running Python's own standard library: its .py files of 32 KiB and more

Names decide what is held out, so they do not hold the folder's own path. Not here: tokens.
"""

from __future__ import annotations

import glob
import importlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_sp.errors import SequenceParallelError, closest

STDLIB_MINIMUM_BYTES = 32 * 1024
STDLIB_MINIMUM_FILES = 40
_SITE_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """A named text: bytes as read from a file, or a string from a table."""

    name: str
    data: bytes | str

    @property
    def num_bytes(self) -> int:
        """Size as UTF-8."""
        return len(self.data if isinstance(self.data, bytes) else self.data.encode())


class Documents:
    """Documents of a source, read lazily and in an order that depends on their names alone.

    After an iteration `num_found` and `num_kept` tell how many documents there were and how many were long enough.

    Args:
        source: A path, a glob pattern (``**`` goes deep), a list of these, or "stdlib".
        field: The field of a jsonl line or column of a parquet row that holds the text.
        minimum_bytes: Shorter documents are left out and counted. "stdlib" has at least 32 KiB.

    Raises:
        SequenceParallelError: When nothing matches, or "stdlib" has fewer than 40 files that are long enough.
    """

    def __init__(self, source: str | Sequence[str], *, field: str = "text", minimum_bytes: int = 0) -> None:
        self.source, self.field, self.minimum_bytes = source, field, minimum_bytes
        if source == "stdlib":
            self.minimum_bytes = max(minimum_bytes, STDLIB_MINIMUM_BYTES)
            self.files = _stdlib_files(self.minimum_bytes)
        else:
            patterns = [source] if isinstance(source, str) else list(source)
            self.files = _unique([file for pattern in patterns for file in _match(pattern)])
        self.num_found = 0
        self.num_kept = 0

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents that are long enough."""
        self.num_found = self.num_kept = 0
        for name, path in self.files:
            for document in _read(name, path, self.field):
                self.num_found += 1
                if document.num_bytes >= self.minimum_bytes:
                    self.num_kept += 1
                    yield document

    @property
    def num_bytes(self) -> int:
        """Size of the files on disk."""
        return sum(path.stat().st_size for _, path in self.files)

    def describe(self) -> str:
        """Return one line about the last iteration."""
        least = f" of at least {self.minimum_bytes:,} bytes" if self.minimum_bytes else ""
        left_out = self.num_found - self.num_kept
        found = f"{self.num_kept:,} documents{least} in {len(self.files):,} files of {self.source!r}"
        return found + (f", {left_out:,} shorter ones left out" if left_out else "")


def _match(pattern: str) -> list[tuple[str, Path]]:
    """Return the (name, path) of the files of a path or pattern, sorted by name."""
    expanded = os.path.expanduser(pattern)
    if Path(expanded).is_file():
        return [(Path(expanded).name, Path(expanded))]
    if Path(expanded).is_dir():
        raise SequenceParallelError(
            f"source {pattern!r} is a folder: say which of its files, e.g. {os.path.join(pattern, '**', '*.txt')!r}"
        )
    if not glob.has_magic(expanded):
        folder = Path(expanded).parent
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        known = [*names, "stdlib"]
        raise SequenceParallelError(f"source {pattern!r} is no file{closest(Path(expanded).name, known)}")
    fixed = Path(*_fixed_parts(expanded))
    paths = [Path(found) for found in glob.glob(expanded, recursive=True)]
    files = sorted((path.relative_to(fixed).as_posix(), path) for path in paths if path.is_file())
    if not files:
        raise SequenceParallelError(f"source {pattern!r} matches no file (looked from {str(fixed.absolute())!r})")
    return files


def _fixed_parts(pattern: str) -> list[str]:
    parts: list[str] = []
    for part in Path(pattern).parts:
        if glob.has_magic(part):
            break
        parts.append(part)
    return parts or ["."]


def _unique(files: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """Give files of equal names their folders too, and refuse one file listed twice."""
    by_path: dict[Path, str] = {}
    for name, path in files:
        if path.resolve() in by_path:
            raise SequenceParallelError(f"source lists {str(path)!r} twice: its text would count double")
        by_path[path.resolve()] = name
    names = list(by_path.values())
    return sorted(
        (name if names.count(name) == 1 else path.as_posix(), original)
        for (path, name), (_, original) in zip(by_path.items(), files, strict=True)
    )


def _stdlib_files(minimum_bytes: int) -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _SITE_FOLDERS)
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        files += [p for p in paths if p.is_file() and p.stat().st_size >= minimum_bytes]
    if len(files) < STDLIB_MINIMUM_FILES:
        raise SequenceParallelError(
            f"source 'stdlib' found {len(files)} .py files of at least {minimum_bytes:,} bytes under {str(root)!r}, "
            f"fewer than the {STDLIB_MINIMUM_FILES} it needs: this Python has a reduced library; give your own text"
        )
    return sorted((path.relative_to(root).as_posix(), path) for path in files)


def _read(name: str, path: Path, field: str) -> Iterator[Document]:
    if path.suffix == ".jsonl":
        yield from _read_jsonl(name, path, field)
    elif path.suffix == ".parquet":
        yield from _read_parquet(name, path, field)
    else:
        with _named(path):
            data = path.read_bytes()
        yield Document(name, data)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Say of which file an error of reading is."""
    try:
        yield
    except OSError as error:
        raise SequenceParallelError(f"source {str(path)!r} cannot be read: {type(error).__name__}: {error}") from error


def _checked(name: str, text: str, where: str) -> Document:
    """Return a text as a document, if it can be written as bytes: JSON may hold half of a character (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise SequenceParallelError(
            f"{where} holds half of a character, {half} at {error.start} of {len(text)}, which is no text: replace it, or leave it out"
        ) from error
    return Document(name, text)


def _read_jsonl(name: str, path: Path, field: str) -> Iterator[Document]:
    with _named(path), path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise SequenceParallelError(f"{path}, line {number} is no JSON: {error}") from error
            text = record.get(field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                known = [str(key) for key in record] if isinstance(record, dict) else []
                raise SequenceParallelError(
                    f"{path}, line {number} has no text in field {field!r}: it has {known}{closest(field, known)}"
                )
            yield _checked(f"{name}:{number}", text, f"{path}, line {number}")


def _read_parquet(name: str, path: Path, field: str) -> Iterator[Document]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise SequenceParallelError(
            f"reading {path} needs pyarrow: pip install 'lightning-sp[parquet]', or convert it to jsonl"
        ) from error
    for row, text in enumerate(_column(parquet, path, field), start=1):
        if not isinstance(text, str | bytes):
            raise SequenceParallelError(f"{path}, row {row} has no text in column {field!r}: {text!r}")
        yield Document(f"{name}:{row}", text)


def _column(parquet: Any, path: Path, field: str) -> Iterator[Any]:
    """Yield a column's values. Whatever pyarrow raises of a damaged file is named."""
    try:
        with parquet.ParquetFile(path) as table:
            if field not in table.schema_arrow.names:
                known = list(table.schema_arrow.names)
                raise SequenceParallelError(f"{path} has no column {field!r}: it has {known}{closest(field, known)}")
            for batch in table.iter_batches(batch_size=256, columns=[field]):
                yield from batch.column(0).to_pylist()
    except SequenceParallelError:
        raise
    except Exception as error:  # of a file that is no parquet, cut short or damaged any
        raise SequenceParallelError(f"{path} cannot be read as parquet: {type(error).__name__}: {error}") from error
