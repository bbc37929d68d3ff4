"""Writes docs/options.md, the table of the strategy's options, from their dataclass: `python -m tools.options_table`."""

from __future__ import annotations

import inspect
import re
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union

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
WIDTH = 120
HEAD = """# Options

`SequenceParallelStrategy(...)`, `conf/strategy/sequence_parallel.yaml` and
`--trainer.strategy.init_args.*` of the Lightning CLI take the same options.
What each choice means, "auto" too, is below the table. `lightning_sp/config/` refuses what does not fit together.
`python -m tools.options_table` writes this page.

"""
MORE = """
## More about each

"""
TAIL = """
`process_group_backend` is Lightning's own, as in its strategies: `None` chooses `nccl` on GPUs and `gloo` on the CPU.
"""


def descriptions() -> dict[str, str]:
    """Return what the dataclasses say of each option."""
    found = {}
    for owner in (AttentionOptions, MemoryOptions, StrategyConfig):
        arguments = inspect.getdoc(owner).split("Args:\n")[1].split("\n\n")[0]  # type: ignore[union-attr]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE):
            found[name] = " ".join(text.split()).replace("``", "`")
    return found


def first_sentence(text: str) -> str:
    """Return a text up to its first full stop."""
    return re.split(r"(?<=\.)\s", text)[0]


def type_of(name: str, hint: Any) -> str:
    """Return an option's type as a reader knows it."""
    if name in CHOICES:
        return " ".join(f'`"{choice}"`' for choice in CHOICES[name])
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is Union else (hint,)
    return " or ".join(f"`{shown}`" for kind in kinds for shown in _names_of(kind))


def _names_of(kind: Any) -> list[str]:
    if typing.get_origin(kind) is Literal:
        return [f'"{choice}"' for choice in typing.get_args(kind)]
    if typing.get_origin(kind) is Mapping:
        return [f"dict[{', '.join(each.__name__ for each in typing.get_args(kind))}]"]
    return ["None" if kind is types.NoneType else kind.__name__]


def page() -> str:
    """Return the page, its rows in the order of the strategy's signature."""
    hints, said = typing.get_type_hints(StrategyConfig), descriptions()
    defaults = {field.name: field.default for field in fields(StrategyConfig)}
    names = [name for name in inspect.signature(SequenceParallelStrategy).parameters if name in defaults]
    rows = [("option", "type", "default", "what it does"), ("---",) * 4]
    for name in names:
        default = f'"{defaults[name]}"' if isinstance(defaults[name], str) else str(defaults[name])
        rows.append((f"`{name}`", type_of(name, hints[name]), f"`{default}`", first_sentence(said[name])))
    more = [f"- `{name}`: {said[name]}" for name in names if said[name] != first_sentence(said[name])]
    wrapped = ("\n".join(textwrap.wrap(each, WIDTH, subsequent_indent="  ", break_on_hyphens=False)) for each in more)
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows) + TAIL + MORE + "\n".join(wrapped) + "\n"


if __name__ == "__main__":
    TARGET.write_text(page())
    print(f"wrote {TARGET}")
