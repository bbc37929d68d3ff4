"""Writes docs/options.md, the table of the strategy's options, from their dataclass: `python -m tools.options_table`."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning_sp.config import (
    BALANCES,
    CHECKPOINT_POLICIES,
    GATHER_DTYPES,
    GRADIENT_DTYPES,
    KERNELS,
    OFFLOAD_TIERS,
    RING_METHODS,
    RING_TRANSPORTS,
    STAGE_INPUTS,
    AttentionOptions,
    MemoryOptions,
    Size,
    StrategyConfig,
)
from lightning_sp.strategy import SequenceParallelStrategy

TARGET = Path(__file__).parents[1] / "docs" / "options.md"
CHOICES = {
    "kernel": KERNELS,
    "ring_transport": RING_TRANSPORTS,
    "ring_method": RING_METHODS,
    "activation_checkpointing": CHECKPOINT_POLICIES,
    "activation_offload": OFFLOAD_TIERS,
    "stage_inputs": STAGE_INPUTS,
    "balance": BALANCES,
    "gather_dtype": GATHER_DTYPES,
    "gradient_dtype": GRADIENT_DTYPES,
}
HEAD = """# Options

`SequenceParallelStrategy(...)`, `conf/strategy/sequence_parallel.yaml` and
`--trainer.strategy.init_args.*` of the Lightning CLI take the same options.
`lightning_sp/config/` says more about each, and refuses what does not fit together.
`python -m tools.options_table` writes this page.

"""
TAIL = """
`process_group_backend` is Lightning's own, as in its strategies: `None` chooses `nccl` on GPUs and `gloo` on the CPU.
"""


def descriptions() -> dict[str, str]:
    """Return the first sentence that the dataclasses say of each option."""
    found = {}
    for owner in (AttentionOptions, MemoryOptions, StrategyConfig):
        arguments = inspect.getdoc(owner).split("Args:\n")[1].split("\n\n")[0]  # type: ignore[union-attr]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE):
            found[name] = re.split(r"(?<=\.)\s", " ".join(text.split()))[0].replace("``", "`")
    return found


def type_of(name: str, hint: Any) -> str:
    """Return an option's type as a reader knows it."""
    if name in CHOICES:
        return " ".join(f'`"{choice}"`' for choice in CHOICES[name])
    if hint == Size | None:
        return '`int` or `"auto"` or `None`'
    if hint == Size:
        return '`int` or `"auto"`'
    if hint == Size | None:
        return '`int`, `"auto"` or `None`'
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)] or [hint]
    shown = [_name_of(kind) for kind in kinds]
    return " or ".join(f"`{kind}`" for kind in [*shown, *(["None"] if kinds != [hint] else [])])


def _name_of(kind: Any) -> str:
    if typing.get_origin(kind) is Mapping:
        return f"dict[{', '.join(each.__name__ for each in typing.get_args(kind))}]"
    name: str = kind.__name__
    return name


def page() -> str:
    """Return the page, its rows in the order of the strategy's signature."""
    hints, said = typing.get_type_hints(StrategyConfig), descriptions()
    defaults = {field.name: field.default for field in fields(StrategyConfig)}
    names = [name for name in inspect.signature(SequenceParallelStrategy).parameters if name in defaults]
    rows = [("option", "type", "default", "what it does"), ("---",) * 4]
    for name in names:
        default = f'"{defaults[name]}"' if isinstance(defaults[name], str) else str(defaults[name])
        rows.append((f"`{name}`", type_of(name, hints[name]), f"`{default}`", said[name]))
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows) + TAIL


if __name__ == "__main__":
    TARGET.write_text(page())
    print(f"wrote {TARGET}")
