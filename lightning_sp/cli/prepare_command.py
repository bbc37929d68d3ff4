"""`lightning-sp prepare`: text -> a token file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from lightning_sp.errors import SequenceParallelError
from lightning_sp.text.prepare import prepare


def prepare_command(arguments: Sequence[str]) -> None:
    """Run `lightning-sp prepare`."""
    parser = argparse.ArgumentParser(
        "lightning-sp prepare", description="Write a token file (.bin/.idx) from documents."
    )
    parser.add_argument("source", nargs="+", help="text, .jsonl or .parquet files, glob patterns, or 'stdlib'")
    parser.add_argument("--output", required=True, help="the token file's path, without .bin or .idx")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, a tokenizers .json, a Hugging Face folder")
    parser.add_argument("--field", default="text", help="the documents' field in .jsonl and .parquet")
    parser.add_argument("--minimum-bytes", type=int, default=0, help="leave shorter documents out")
    options: Any = parser.parse_args(list(arguments))
    source = options.source[0] if len(options.source) == 1 else options.source
    try:
        written = prepare(
            source,
            options.output,
            tokenizer=options.tokenizer,
            field=options.field,
            minimum_bytes=options.minimum_bytes,
        )
    except SequenceParallelError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(written.describe())
