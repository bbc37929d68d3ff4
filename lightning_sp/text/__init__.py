"""Text -> documents -> tokens -> windows: what a sample is made of. Nothing here knows of ranks or of sequence parallelism."""

from lightning_sp.text.corpus import Corpus, MemoryCorpus, split_by_name
from lightning_sp.text.documents import Document, Documents
from lightning_sp.text.indexed_dataset import TokenFile
from lightning_sp.text.indexed_dataset_writer import TokenFileWriter
from lightning_sp.text.prepare import PreparedTokens, open_prepared, prepare
from lightning_sp.text.source import Source
from lightning_sp.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from lightning_sp.text.unigram import held_out_perplexity, unigram_perplexity
from lightning_sp.text.windows import Sample, Windows

__all__ = [
    "ByteTokenizer",
    "Corpus",
    "Document",
    "Documents",
    "MemoryCorpus",
    "PreparedTokens",
    "Sample",
    "Source",
    "TokenFile",
    "TokenFileWriter",
    "Tokenizer",
    "Windows",
    "held_out_perplexity",
    "load_tokenizer",
    "open_prepared",
    "prepare",
    "split_by_name",
    "unigram_perplexity",
]
