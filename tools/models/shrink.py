"""The tiny configuration of any model type: its class's own defaults, each number made small by the rules of its name."""

from __future__ import annotations

import dataclasses
from typing import Any

from tools.models.rules import (
    AT_MOST,
    END_OF_TOKENS,
    KEPT,
    NO_TOKEN,
    OFF,
    OVERRIDES,
    STACKS,
    SWITCHED_OFF,
    TOKEN,
    VOCABULARY,
)


def tiny_config(model_type: str) -> Any:
    """Return a small configuration of a model type.

    Raises:
        Exception: whatever the configuration's class raises on it.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: PLC0415

    config_class = CONFIG_MAPPING[model_type]
    values = shrunk(config_class, {}, _Tokens())
    if getattr(config_class, "is_encoder_decoder", False) and not hasattr(config_class, "decoder_start_token_id"):
        values["decoder_start_token_id"] = getattr(config_class, "pad_token_id", None) or 0
    for path, value in OVERRIDES.get(model_type, {}).items():
        _set(values, path.split("."), value)
    return config_class(**values)


def shrunk(config_class: Any, given: dict[str, Any], tokens: _Tokens) -> dict[str, Any]:
    """Return the keywords of a small configuration.

    Args:
        config_class: of transformers.
        given: values in place of the class's defaults, not yet small.
        tokens: of the whole model.
    """
    values = {}
    parts = getattr(config_class, "sub_configs_defaults", {}) or {}
    defaults = {f.name: f.default for f in dataclasses.fields(config_class)} | given
    num_layers = next(
        (n for name in ("num_hidden_layers", "num_layers", "n_layer") if isinstance(n := defaults.get(name), int)), 0
    )
    for name, default in defaults.items():
        if name in parts:
            continue
        value = _small(name, default, num_layers, defaults, tokens)
        if value is not default or name in given:
            values[name] = value
    kinds = _kinds_of_layers(config_class, given)
    if len(kinds) > 1 and "num_hidden_layers" in values:
        values |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    for name, spec in parts.items():
        if spec.optional and name not in given:
            continue
        part_class = (
            spec.get_config_class(spec.model_type) if spec.config_class.__name__ == "AutoConfig" else spec.config_class
        )
        part = shrunk(part_class, dict(spec.init_kwargs) | dict(given.get(name) or {}), tokens)
        if spec.config_class.__name__ == "AutoConfig":
            part["model_type"] = spec.model_type
        values[name] = part
    return values


def _kinds_of_layers(config_class: Any, given: dict[str, Any]) -> list[str]:
    """Return each kind of layer that the class's own model has, in order; none where the class does not say."""
    if not any(f.name == "layer_types" for f in dataclasses.fields(config_class)):
        return []
    try:
        return list(dict.fromkeys(config_class(**given).layer_types or ()))
    except Exception:  # a class without defaults of its own
        return []


class _Tokens:
    """Numbers of special tokens that lie beyond a small vocabulary: each gets one of its own, the same wherever the model names it."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def number(self, original: int) -> int:
        free = END_OF_TOKENS + len(self._numbers)
        return (
            original
            if original < VOCABULARY and original < END_OF_TOKENS
            else self._numbers.setdefault(original, min(free, VOCABULARY - 1))
        )


def _small(name: str, default: Any, num_layers: int, defaults: dict[str, Any], tokens: _Tokens) -> Any:
    if name in SWITCHED_OFF:
        return SWITCHED_OFF[name]
    if name in KEPT or default is None or isinstance(default, (bool, str)) or default is dataclasses.MISSING:
        return default
    if OFF.fullmatch(name) and isinstance(default, (int, float)):
        return 0.0 if isinstance(default, float) else 0
    if TOKEN.fullmatch(name) and name not in NO_TOKEN:
        if isinstance(default, int) and default >= 0:
            return tokens.number(default)
        if isinstance(default, (list, tuple)) and all(isinstance(n, int) and n >= 0 for n in default):
            return type(default)(tokens.number(n) for n in default)
        return default
    if isinstance(default, (list, tuple)) and num_layers > 2 and len(default) == num_layers:
        return type(default)(default[:2])
    if name in STACKS and isinstance(default, (list, tuple)):
        return type(default)(min(each, STACKS[name]) for each in default)
    if isinstance(default, int):
        for pattern, most in AT_MOST:
            if pattern.fullmatch(name):
                if "key_value" in name and default == defaults.get("num_attention_heads"):
                    return min(default, 2 * most)
                return min(default, most)
    return default


def _set(values: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values[path[-1]] = value
