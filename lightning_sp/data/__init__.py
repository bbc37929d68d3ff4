"""Text or token files -> documents -> tokens -> windows -> an order -> batches, independent of the degrees."""

from lightning_sp.data.datamodule import SequenceShardingDataModule
from lightning_sp.data.loaders.collate import Batches, FillerAware, stack
from lightning_sp.data.loaders.lazy_loader import LazyDataLoader
from lightning_sp.data.samplers.batch_split import BatchSplit
from lightning_sp.data.samplers.evaluation_sampler import EvaluationBatchSampler
from lightning_sp.data.samplers.training_sampler import GlobalBatchSampler, epoch_permutation
from lightning_sp.labels import IGNORE_INDEX
from lightning_sp.text.corpus import Corpus, MemoryCorpus, split_by_name, unigram_perplexity
from lightning_sp.text.documents import Document, Documents
from lightning_sp.text.indexed_dataset import TokenFile
from lightning_sp.text.indexed_dataset_writer import TokenFileWriter
from lightning_sp.text.prepare import PreparedTokens, open_prepared, prepare
from lightning_sp.text.source import Source
from lightning_sp.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from lightning_sp.text.windows import Sample, Windows

__all__ = [
    "IGNORE_INDEX",
    "BatchSplit",
    "Batches",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "Documents",
    "EvaluationBatchSampler",
    "FillerAware",
    "GlobalBatchSampler",
    "LazyDataLoader",
    "MemoryCorpus",
    "PreparedTokens",
    "Sample",
    "SequenceShardingDataModule",
    "Source",
    "TokenFile",
    "TokenFileWriter",
    "Tokenizer",
    "Windows",
    "epoch_permutation",
    "load_tokenizer",
    "open_prepared",
    "prepare",
    "split_by_name",
    "stack",
    "unigram_perplexity",
]
