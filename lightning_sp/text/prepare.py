"""Text -> a token file on disk, once: the function behind `lightning-sp prepare`.

Beside x.bin and x.idx (Megatron's format, `token_file`) it writes x.idx.json: which tokenizer made the ids, and the
documents' names, by which a DataModule splits off held-out documents. Files without one can be read as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.corpus import encode_document
from lightning_sp.text.documents import Documents
from lightning_sp.text.indexed_dataset import TokenFile, token_file_paths
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
    _write_description(output, asdict(written) | {"names": names})
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
    known = json.loads(description.read_text(encoding="utf-8"))
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
    return TokenFile(path, known["names"])


def description_path(path: str | Path) -> Path:
    """Return the path of the .idx.json beside a token file. It is written last."""
    index = token_file_paths(path)[1]
    return index.with_name(index.name + ".json")


def _write_description(path: str | Path, description: dict[str, object]) -> None:
    final = description_path(path)
    temporary = final.with_name(f"{final.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(description), encoding="utf-8")
    os.replace(temporary, final)
