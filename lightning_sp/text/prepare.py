"""Text -> a token file on disk, once: the function behind `lightning-sp prepare`.

Beside x.bin and x.idx (Megatron's format, `indexed_dataset`) it writes x.idx.json: which tokenizer made the ids, the
documents' names, by which a DataModule splits off held-out documents, and checksums. Files without one can be read as
well; then sizes and the order of documents are compared, and nothing else.

    checked where x.idx.json is     itself and x.idx when opened; each block of x.bin when a process first reads of it
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.corpus import encode_document
from lightning_sp.text.documents import Documents
from lightning_sp.text.indexed_dataset import Checksums, TokenFile, token_file_paths
from lightning_sp.text.indexed_dataset_writer import TokenFileWriter
from lightning_sp.text.tokenizer import Tokenizer, load_tokenizer, token_dtype


@dataclass(frozen=True)
class PreparedTokens:
    """What `prepare` wrote."""

    path: str
    num_documents: int
    num_tokens: int
    num_bytes: int
    num_left_out: int
    num_empty: int
    tokenizer: str

    def describe(self) -> str:
        """Return one line with all counts."""
        return (
            f"{self.path}: {self.num_documents:,} documents, {self.num_tokens:,} tokens from {self.num_bytes:,} bytes "
            f"of text ({self.num_left_out:,} documents too short, {self.num_empty:,} empty left out), "
            f"tokenizer {self.tokenizer}"
        )


def prepare(
    source: str | Sequence[str],
    output: str | Path,
    *,
    tokenizer: str = "bytes",
    field: str = "text",
    minimum_bytes: int = 0,
    progress: bool = True,
) -> PreparedTokens:
    """Tokenize text, jsonl or parquet into ``output``.bin, .idx and .idx.json, showing a progress bar.

    Every document ends with the tokenizer's end-of-document id where it has one. Nothing appears under the final
    names before all is written.

    Args:
        source: As in `documents.Documents`.
        output: Prefix of the files (a .bin or .idx ending is taken off).
        tokenizer: As in `tokenizer.load_tokenizer`.
        field: Field or column with the text, for jsonl and parquet.
        minimum_bytes: Shorter documents are left out and counted.
        progress: False shows no bar.

    Raises:
        SequenceParallelError: From the source, the tokenizer or a document, or when no document is left.
    """
    try:
        return _prepare(source, output, tokenizer, field, minimum_bytes, progress=progress)
    except OSError as error:  # a full disk, a folder that cannot be written to
        raise SequenceParallelError(f"token file {str(output)!r} could not be written: {error}") from error


def _prepare(
    source: str | Sequence[str], output: str | Path, tokenizer: str, field: str, minimum_bytes: int, *, progress: bool
) -> PreparedTokens:
    encoder = load_tokenizer(tokenizer)
    documents = Documents(source, field=field, minimum_bytes=minimum_bytes)
    names: list[str] = []
    num_bytes = num_empty = 0
    with (
        _progress_bar(shown=progress) as bar,
        TokenFileWriter(output, token_dtype(encoder.vocab_size)) as writer,
    ):
        one_each = all(path.suffix not in (".jsonl", ".parquet") for _, path in documents.files)
        task = bar.add_task("", total=len(documents.files) if one_each else None, size="")
        for document in documents:
            if document.num_bytes:
                num_bytes += document.num_bytes
                writer.add(encode_document(document, encoder))
                names.append(document.name)
            else:
                num_empty += 1
            bar.update(task, advance=1, size=f"{num_bytes / 1e6:,.1f} MB")
        if one_each:
            bar.update(task, completed=len(documents.files))
        if not names:
            raise SequenceParallelError(
                f"no document left to write to {str(output)!r}: {documents.describe()}, {num_empty} of them empty"
            )
    written = PreparedTokens(
        path=str(token_file_paths(output)[1]),
        num_documents=len(names),
        num_tokens=writer.num_tokens,
        num_bytes=num_bytes,
        num_left_out=documents.num_found - documents.num_kept,
        num_empty=num_empty,
        tokenizer=encoder.identity,
    )
    _write_description(output, asdict(written) | {"names": names}, writer.checksums)
    return written


def _progress_bar(*, shown: bool) -> Progress:
    columns = (TextColumn("preparing"), BarColumn(), MofNCompleteColumn(), TextColumn("documents, {task.fields[size]}"))
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, *times, console=Console(stderr=True), disable=not shown)


def open_prepared(path: str | Path, tokenizer: Tokenizer) -> TokenFile:
    """Open a token file, with its documents' names where `prepare` left them.

    Raises:
        SequenceParallelError: When the files are damaged, belong to another .json, or were made by another tokenizer.
    """
    description = description_path(path)
    if not description.is_file():
        return TokenFile(path)
    known = _read_description(description)
    if known["tokenizer"] != tokenizer.identity:
        raise SequenceParallelError(
            f"{str(path)!r} was written with tokenizer {known['tokenizer']}, the one given is {tokenizer.identity}: "
            "give the tokenizer that it was prepared with, or prepare it again"
        )
    tokens = TokenFile(path)
    if (tokens.num_tokens, len(tokens.sizes)) != (known["num_tokens"], known["num_documents"]):
        raise SequenceParallelError(
            f"{str(description)!r} describes {known['num_documents']} documents with {known['num_tokens']} tokens, the "
            f"files beside it hold {len(tokens.sizes)} with {tokens.num_tokens}: prepare them again, or delete the .json"
        )
    if "crc32" in known and known["crc32"] != _crc32(known):
        raise SequenceParallelError(
            f"{str(description)!r} is damaged: it has not the checksum that it was written with; prepare it again, or delete it"
        )
    checksums = known.get("checksums")
    return TokenFile(path, known["names"], None if checksums is None else Checksums(**checksums))


def _read_description(path: Path) -> dict[str, Any]:
    """Return what an .idx.json says.

    Raises:
        SequenceParallelError: It is no JSON, or lacks what a token file is opened by.
    """
    damaged = f"{str(path)!r} is damaged, or no description of a token file"
    fix = "prepare it again (`lightning-sp prepare`), or delete it"
    try:
        known: dict[str, Any] = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise SequenceParallelError(f"{damaged}: {type(error).__name__}: {error}; {fix}") from error
    kinds = {"tokenizer": str, "num_documents": int, "num_tokens": int, "names": list}
    for key, kind in kinds.items():
        found = known.get(key) if isinstance(known, dict) else None
        if not isinstance(found, kind):
            raise SequenceParallelError(f"{damaged}: its {key!r} is {str(found)[:40]!r}, no {kind.__name__}; {fix}")
    checksums = known.get("checksums", {"index": 0, "blocks": []})
    is_known = isinstance(checksums, dict) and checksums.keys() == {"index", "blocks"}
    if not is_known or not all(isinstance(each, str) for each in known["names"]):
        raise SequenceParallelError(f"{damaged}: its names are no texts, or its checksums no numbers; {fix}")
    return known


def _crc32(description: dict[str, Any]) -> int:
    rest = {name: value for name, value in description.items() if name != "crc32"}
    return zlib.crc32(json.dumps(rest).encode())


def description_path(path: str | Path) -> Path:
    """Return the path of the .idx.json beside a token file. It is written last."""
    index = token_file_paths(path)[1]
    return index.with_name(index.name + ".json")


def _write_description(path: str | Path, description: dict[str, Any], checksums: Checksums) -> None:
    final = description_path(path)
    temporary = final.with_name(f"{final.name}.{os.getpid()}.tmp")
    described = description | {"checksums": asdict(checksums)}
    try:
        temporary.write_text(json.dumps(described | {"crc32": _crc32(described)}), encoding="utf-8")
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
