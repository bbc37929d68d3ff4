"""Text -> token ids, by an option string.

    "bytes"               ids 0..255 are the bytes themselves, 256 ends a document: vocab_size 257, no files needed
    "path/to/x.json"      a `tokenizers` file (the `tokenizers` extra)
    "path/to/folder"      a Hugging Face tokenizer's folder (the `hf` extra), read from disk alone

Not here: when a document ends (`corpus.encode_document` appends the id).
"""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_sp.errors import SequenceParallelError, closest

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>")


class Tokenizer(Protocol):
    """What the data needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document, None where there is none."""

    @property
    def identity(self) -> str:
        """The same for tokenizers that give the same ids."""

    def encode(self, text: str | bytes) -> NDArray[np.int64]:
        """Return the ids of a text, without special tokens. Bytes are UTF-8."""


class ByteTokenizer:
    """Each byte is its own id; 256 ends a document."""

    vocab_size = 257
    eos_id = 256
    identity = "bytes"

    def encode(self, text: str | bytes) -> NDArray[np.int64]:
        """Return the bytes as ids."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8).astype(np.int64)


class FileTokenizer:
    """A `tokenizers` JSON file. The first known end-of-document token of its vocabulary ends a document."""

    def __init__(self, path: Path) -> None:
        tokenizers = _extra("tokenizers", "tokenizers", str(path))
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # it raises that very class
            raise SequenceParallelError(f"{str(path)!r} is no tokenizers file: {error}") from error
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        ids = [self._tokenizer.token_to_id(token) for token in _END_TOKENS]
        self.eos_id: int | None = next((i for i in ids if i is not None), None)
        self.identity = _identity(self._tokenizer.to_str())

    def encode(self, text: str | bytes) -> NDArray[np.int64]:
        """Return the ids of a text."""
        return np.asarray(self._tokenizer.encode(_text(text), add_special_tokens=False).ids, dtype=np.int64)


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer's folder, its own end-of-sequence token ending a document."""

    def __init__(self, folder: Path) -> None:
        loader = _extra("transformers", "hf", str(folder)).AutoTokenizer
        try:
            self._tokenizer: Any = loader.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # of damaged files any
            raise SequenceParallelError(f"no Hugging Face tokenizer in {str(folder)!r}: {error}") from error
        self.vocab_size: int = len(self._tokenizer)
        self.eos_id: int | None = self._tokenizer.eos_token_id
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self.identity = _identity(backend.to_str() if backend else repr(sorted(self._tokenizer.get_vocab().items())))

    def encode(self, text: str | bytes) -> NDArray[np.int64]:
        """Return the ids of a text."""
        ids = self._tokenizer(_text(text), add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int64)


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Return the tokenizer of an option string.

    Raises:
        SequenceParallelError: When it is neither "bytes" nor a tokenizer's file or folder, with the nearest name.
    """
    if not isinstance(name, (str, Path)):
        raise SequenceParallelError(
            f"tokenizer={name!r}: must be 'bytes', a tokenizers .json file or a tokenizer's folder"
        )
    if name == "bytes":
        return ByteTokenizer()
    path, name = Path(name).expanduser(), str(name)
    if path.is_dir():
        return HuggingFaceTokenizer(path)
    if path.is_file() and path.suffix == ".json":
        return FileTokenizer(path)
    beside = [str(path.parent / entry.name) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    raise SequenceParallelError(
        f"tokenizer {name!r} is neither 'bytes' nor a tokenizers .json file nor a tokenizer's folder"
        + closest(name, ["bytes", *beside])
    )


def token_dtype(vocab_size: int) -> np.dtype[np.integer]:
    """Return the dtype in which Megatron stores ids of this vocabulary: uint16 below 65,500, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65_500 else np.int32)


def _text(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode()


def _identity(serialized: str) -> str:
    return f"sha256:{hashlib.sha256(serialized.encode()).hexdigest()[:16]}"


def _extra(module: str, extra: str, needed_by: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise SequenceParallelError(
            f"tokenizer {needed_by!r} needs the package {module}: pip install 'lightning-sp[{extra}]'"
        ) from error
