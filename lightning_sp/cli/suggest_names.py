"""The nearest name for each Hydra override of a key that does not exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from lightning_sp.cli.program import CONFIG_NAME
from lightning_sp.errors import closest


def suggest_names(arguments: Sequence[str]) -> Iterator[str]:
    """Yield one line for each override of a key that does not exist, with the nearest that does."""
    try:
        overrides = OverridesParser.create().parse_overrides(get_args_parser().parse_args(list(arguments)).overrides)
    except (HydraException, SystemExit):
        return
    with hydra.initialize_config_module("lightning_sp.conf", version_base="1.3"):
        groups = [
            item.input_line
            for item in overrides
            if item.input_line is not None and "." not in item.key_or_group and not item.is_add()
        ]
        try:
            config = hydra.compose(CONFIG_NAME, overrides=groups, return_hydra_config=True)
        except HydraException:
            config = hydra.compose(CONFIG_NAME, return_hydra_config=True)
    known = list(config_keys(OmegaConf.to_container(config)))
    for item in overrides:
        if not item.is_add() and "." in item.key_or_group and item.key_or_group not in known:
            yield f"{item.key_or_group!r} is no option here{closest(item.key_or_group, known)}"


def config_keys(node: object, prefix: str = "") -> Iterator[str]:
    """Yield every key of a nested mapping, dotted."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield f"{prefix}{name}"
            yield from config_keys(value, f"{prefix}{name}.")
