"""Documents as token ids, addressable without copying: what windows are cut from.

Owns the `Corpus` protocol, the corpus in memory and the view of some documents of another. One on disk is
`indexed_dataset.TokenFile`. Not here: where text comes from, how windows lie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.documents import Document
from lightning_sp.text.tokenizer import Tokenizer, token_dtype

Tokens = NDArray[np.integer]


class Corpus(Protocol):
    """Documents of token ids."""

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Tokens of each document."""

    @property
    def names(self) -> Sequence[str]:
        """A name of each document that stays when others come or go."""

    def read(self, document: int, start: int, stop: int) -> Tokens:
        """Return tokens [start, stop) of a document, as a view where possible."""

    def fingerprint(self) -> str:
        """Return a digest that differs when the data differ."""


class MemoryCorpus:
    """All documents' tokens in one array.

    Args:
        tokens: The concatenated documents.
        sizes: Tokens of each.
        names: Name of each.
    """

    def __init__(self, tokens: Tokens, sizes: Sequence[int] | NDArray[np.int64], names: Sequence[str]) -> None:
        self.tokens = tokens
        self.sizes: NDArray[np.int64] = np.asarray(sizes, dtype=np.int64)
        self.names = names
        if len(self.sizes) != len(names) or int(self.sizes.sum()) != len(tokens):
            raise SequenceParallelError(
                f"{len(self.sizes)} sizes with {int(self.sizes.sum())} tokens in all do not describe "
                f"{len(names)} names and {len(tokens)} tokens"
            )
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])

    @classmethod
    def from_documents(cls, documents: Iterable[Document], tokenizer: Tokenizer) -> MemoryCorpus:
        """Tokenize documents, each followed by the tokenizer's end-of-document id where it has one."""
        dtype = token_dtype(tokenizer.vocab_size)
        parts, names = [], []
        for document in documents:
            parts.append(encode_document(document, tokenizer).astype(dtype))
            names.append(document.name)
        tokens = np.concatenate(parts) if parts else np.empty(0, dtype)
        return cls(tokens, [len(part) for part in parts], names)

    def read(self, document: int, start: int, stop: int) -> Tokens:
        """Return a view of tokens [start, stop) of a document."""
        first = self._starts[document]
        return self.tokens[first + start : first + stop]

    def fingerprint(self) -> str:
        """Return a digest of every token, size and name."""
        digest = hashlib.sha256("\n".join(self.names).encode("utf-8", "surrogatepass"))
        digest.update(self.sizes.tobytes())
        digest.update(np.ascontiguousarray(self.tokens).data)
        return digest.hexdigest()[:32]


class CorpusView:
    """Some documents of a corpus, in the order given."""

    def __init__(self, corpus: Corpus, documents: NDArray[np.int64]) -> None:
        self._corpus, self._documents = corpus, documents
        self.sizes: NDArray[np.int64] = corpus.sizes[documents]
        names = corpus.names
        self.names: Sequence[str] = [names[i] for i in documents]

    def read(self, document: int, start: int, stop: int) -> Tokens:
        """Return tokens [start, stop) of a document of the view."""
        return self._corpus.read(int(self._documents[document]), start, stop)

    def fingerprint(self) -> str:
        """Return a digest of the corpus and of the choice."""
        return hashlib.sha256(self._corpus.fingerprint().encode() + self._documents.tobytes()).hexdigest()[:32]


def encode_document(document: Document, tokenizer: Tokenizer) -> Tokens:
    """Return a document's token ids, with the end-of-document id last where the tokenizer has one.

    Raises:
        SequenceParallelError: With the document's name, when its bytes are no text for this tokenizer.
    """
    try:
        ids = tokenizer.encode(document.data)
    except UnicodeDecodeError as error:
        raise SequenceParallelError(
            f"document {document.name!r} is not UTF-8 (byte {error.start} of {len(error.object)}): convert it, leave "
            "it out, or use tokenizer='bytes', which takes any file"
        ) from error
    return ids if tokenizer.eos_id is None else np.append(ids, ids.dtype.type(tokenizer.eos_id))


def split_by_name(corpus: Corpus, held_out: int | float) -> tuple[CorpusView, CorpusView]:
    """Split a corpus into (training, held-out) documents by a hash of each document's name.

    With a fraction the side of a document depends on its own name alone: files that come or go move no other. With a
    number, those with the smallest hashes are held out.
    """
    num_documents = len(corpus.sizes)
    if isinstance(held_out, float) and not 0 <= held_out < 1:
        raise SequenceParallelError(f"held_out as a fraction must be in [0, 1), got {held_out}; a number is an int")
    if isinstance(held_out, int) and not 0 <= held_out < max(1, num_documents):
        raise SequenceParallelError(
            f"held_out as a number must leave at least one of the {num_documents} documents to train on, got {held_out}"
        )
    # A file's name need not be UTF-8: Python writes its other bytes as lone surrogates.
    hashes = np.array(
        [
            int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big")
            for name in corpus.names
        ],
        dtype=np.uint64,
    )
    is_held_out = np.zeros(num_documents, dtype=bool)
    if isinstance(held_out, int):
        is_held_out[np.argsort(hashes, kind="stable")[:held_out]] = True
    else:
        is_held_out = hashes < np.uint64(int(held_out * 2**64))
    return (
        CorpusView(corpus, np.flatnonzero(~is_held_out).astype(np.int64)),
        CorpusView(corpus, np.flatnonzero(is_held_out).astype(np.int64)),
    )
