"""Bytes, a file of tokenizers and a folder of Hugging Face."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.corpus import MemoryCorpus
from lightning_sp.text.documents import Document
from lightning_sp.text.tokenizer import load_tokenizer


def test_bytes_are_ids_and_256_ends_a_document():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode(b"\x00\xff").tolist() == [*tokenizer.encode("\x00").tolist(), 255] == [0, 255]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    corpus = MemoryCorpus.from_documents([Document("a", "é"), Document("b", b"")], tokenizer)
    assert corpus.tokens.tolist() == [0xC3, 0xA9, 256, 256]
    assert corpus.sizes.tolist() == [3, 1]
    assert corpus.tokens.dtype == np.uint16


def test_a_tokenizers_file_and_a_hugging_face_folder_agree(tokenizer_file, tmp_path):
    PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), eos_token="</s>", unk_token="[UNK]").save_pretrained(
        tmp_path
    )
    for name in (str(tokenizer_file), str(tmp_path)):
        tokenizer = load_tokenizer(name)
        assert tokenizer.encode(b"two one four").tolist() == tokenizer.encode("two one four").tolist() == [2, 1, 0]
        assert (tokenizer.vocab_size, tokenizer.eos_id) == (5, 4)
        assert tokenizer.identity.startswith("sha256:")
    with pytest.raises(SequenceParallelError, match=r"document 'x' is not UTF-8 \(byte 1 of 3\)"):
        MemoryCorpus.from_documents([Document("x", b"a\xff\xff")], load_tokenizer(str(tokenizer_file)))


def test_unknown_tokenizers_are_refused_with_the_nearest(tokenizer_file, tmp_path):
    with pytest.raises(SequenceParallelError, match=r"'byte' is neither .*; did you mean 'bytes'"):
        load_tokenizer("byte")
    with pytest.raises(SequenceParallelError, match=r"did you mean '.*words\.json'"):
        load_tokenizer(str(tokenizer_file).replace("words", "word"))
    with pytest.raises(SequenceParallelError, match="no Hugging Face tokenizer in"):
        load_tokenizer(str(tmp_path))
