"""`lightning-sp export`: a checkpoint -> a plain state dict."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from lightning_sp.checkpoint import export_checkpoint
from lightning_sp.errors import SequenceParallelError


def export_command(arguments: Sequence[str]) -> None:
    """Run `lightning-sp export`."""
    parser = argparse.ArgumentParser(
        "lightning-sp export", description="Write a checkpoint's model as a plain state dict, for the unwrapped model."
    )
    parser.add_argument("checkpoint", help="a checkpoint's folder or file, of any degrees")
    parser.add_argument("output", help="a .pt or .safetensors file")
    parser.add_argument("--prefix", default="", help="the part to keep, its name left out, e.g. 'model.'")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="cast to it; as trained by default")
    options: Any = parser.parse_args(list(arguments))
    dtype = getattr(torch, options.dtype) if options.dtype else None
    try:
        written = export_checkpoint(options.checkpoint, options.output, prefix=options.prefix, dtype=dtype)
    except SequenceParallelError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(f"{written}: {written.stat().st_size} bytes")
