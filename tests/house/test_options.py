"""One table of options: the signature, its dataclass, the YAML and the docs agree in names, types and defaults."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import yaml

import lightning_sp
from lightning_sp import SequenceParallelStrategy
from lightning_sp.config import StrategyConfig
from tools import options_table

YAML = Path(lightning_sp.__file__).parent / "conf" / "strategy" / "sequence_parallel.yaml"
DEFAULTS = {field.name: field.default for field in fields(StrategyConfig)}
PARAMETERS = {
    name: parameter
    for name, parameter in inspect.signature(SequenceParallelStrategy).parameters.items()
    if name not in ("process_group_backend", "unknown")  # Lightning's own, and what is refused by name
}


def test_the_signature_is_that_of_the_dataclass():
    assert {name: parameter.default for name, parameter in PARAMETERS.items()} == DEFAULTS
    hints, given = typing.get_type_hints(StrategyConfig), typing.get_type_hints(SequenceParallelStrategy.__init__)
    # The CLI builds a dict.
    hints["sequence_dims"] = dict[str, int] | None if hints["sequence_dims"] == Mapping[str, int] | None else None
    assert {name: given[name] for name in PARAMETERS} == {name: hints[name] for name in DEFAULTS}


def test_the_yaml_is_in_the_order_of_the_signature_with_its_defaults():
    written = yaml.safe_load(YAML.read_text())
    assert written.pop("_target_") == "lightning_sp.SequenceParallelStrategy"
    assert list(written) == list(PARAMETERS)
    assert written == DEFAULTS


def test_the_page_is_what_the_tool_writes():
    assert options_table.TARGET.read_text() == options_table.page(), "python -m tools.options_table writes it again"


def test_every_option_arrives_where_it_is_given():
    other = {"sequence_parallel_size": 4, "ring_size": 2, "kernel": "torch", "ring_saves_kv": True, "compile": True}
    config = SequenceParallelStrategy(**other).config
    assert config == StrategyConfig(**other)
