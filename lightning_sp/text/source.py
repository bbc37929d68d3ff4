"""The one option `source` -> a corpus: a token file as it is, text tokenized in memory or kept in a folder.

Not here: which documents are held out, how windows lie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.corpus import Corpus, MemoryCorpus
from lightning_sp.text.documents import Documents
from lightning_sp.text.prepare import description_path, open_prepared, prepare
from lightning_sp.text.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Source:
    """Where the tokens come from.

    Args:
        source: A token file's .idx or .bin, or as in `documents.Documents`.
        tokenizer: As in `tokenizer.load_tokenizer`.
        field: Field or column with the text, for jsonl and parquet.
        minimum_bytes: Shorter documents are left out.
        cache_dir: Folder that keeps tokenized text; None tokenizes in memory.
    """

    source: str | Sequence[str]
    tokenizer: str = "bytes"
    field: str = "text"
    minimum_bytes: int = 0
    cache_dir: str | None = None

    @property
    def is_token_file(self) -> bool:
        """Whether the source is tokenized already."""
        return isinstance(self.source, str) and self.source.endswith((".idx", ".bin"))

    def fill_cache(self) -> str | None:
        """Tokenize into the cache if there is one and it does not hold this source yet; return what was written."""
        prefix = self._cache_prefix()
        if prefix is None or description_path(prefix).is_file():
            return None
        return prepare(
            self.source, prefix, tokenizer=self.tokenizer, field=self.field, minimum_bytes=self.minimum_bytes
        ).describe()

    def open(self) -> tuple[Corpus, str]:
        """Return the corpus and one line about it.

        Raises:
            SequenceParallelError: When nothing is found, the files are damaged, or the cache is not filled.
        """
        encoder = load_tokenizer(self.tokenizer)
        if self.is_token_file:
            if self.minimum_bytes:
                raise SequenceParallelError(
                    f"minimum_bytes={self.minimum_bytes} leaves out short texts, but {self.source!r} holds tokens: "
                    "give it to `lightning-sp prepare`"
                )
            tokens = open_prepared(str(self.source), encoder)
            return tokens, f"{len(tokens.sizes):,} documents, {tokens.num_tokens:,} tokens in {self.source!r}"
        prefix = self._cache_prefix()
        if prefix is not None:
            if not description_path(prefix).is_file():
                raise SequenceParallelError(
                    f"cache_dir {self.cache_dir!r} does not hold {self.source!r} yet: call prepare_data() once on every "
                    "node before setup() (a Trainer does), or share the folder between the nodes"
                )
            tokens = open_prepared(prefix, encoder)
            return (
                tokens,
                f"{len(tokens.sizes):,} documents, {tokens.num_tokens:,} tokens of {self.source!r} in {prefix}",
            )
        documents = Documents(self.source, field=self.field, minimum_bytes=self.minimum_bytes)
        corpus = MemoryCorpus.from_documents(documents, encoder)
        return corpus, f"{documents.describe()}, {len(corpus.tokens):,} tokens"

    def _cache_prefix(self) -> Path | None:
        """Return where the cache holds this source: another name once a file or an option changes."""
        if self.cache_dir is None or self.is_token_file:
            return None
        documents = Documents(self.source, field=self.field, minimum_bytes=self.minimum_bytes)
        stats = [(name, path.stat()) for name, path in documents.files]
        key = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        options = (load_tokenizer(self.tokenizer).identity, self.field, documents.minimum_bytes)
        digest = hashlib.sha256(repr((key, options)).encode()).hexdigest()
        return Path(self.cache_dir) / f"tokens-{digest[:16]}"
