"""Hyperparameters in containers that are no plain ones, OmegaConf's and argparse's: stored as dicts and lists, and read as what they were.

in the run      hyper_parameters: {"cfg": DictConfig}
stored          hyper_parameters: {"cfg": {...}}, CONTAINERS: [{"at": ["hyper_parameters", "cfg"], "kind": "DictConfig", ...}]
read            hyper_parameters: {"cfg": DictConfig}
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

# Lightning's entries of hyperparameters, and where it says of which class all of them are.
HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
TYPES = {"hyper_parameters": "hparams_type", "datamodule_hyper_parameters": "datamodule_hparams_type"}
# The entry of a checkpoint with what its containers were.
CONTAINERS = "lightning_sp_containers"
_OF_OMEGACONF = ("DictConfig", "ListConfig")
_FLAGS = ("readonly", "struct")


def described_containers(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, in plain values, which containers of a checkpoint's hyperparameters are no plain ones, and where."""
    return [each for key in HYPER_PARAMETERS for each in _described(checkpoint.get(key), (key,))]


def plain_container(value: Any) -> Any:
    """Return what such a container holds as a dict or a list, interpolated where that is possible; anything else as it is."""
    if isinstance(value, Namespace):
        return vars(value)
    if not _is_of_omegaconf(value):
        return value
    from omegaconf import OmegaConf  # noqa: PLC0415 - optional, and there: the value is of it

    with suppress(Exception):  # of an interpolation any: of the environment, of a resolver of the user's
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=False)
    return OmegaConf.to_container(value, resolve=False, throw_on_missing=False)


def key_of(key: Any) -> Any:
    """Return a dict's key as it is stored."""
    return key if type(key) in (str, int, float, bool, tuple, type(None)) else str(key)


def restore_containers(checkpoint: dict[str, Any]) -> None:
    """Make the containers of a checkpoint that was read what they were, in place."""
    stored = checkpoint.pop(CONTAINERS, None)
    if not isinstance(stored, list) or not stored:
        return
    kinds = {tuple(each["at"]): each for each in stored}
    for key in HYPER_PARAMETERS:
        if key in checkpoint:
            checkpoint[key] = _restored(checkpoint[key], (key,), kinds)
            if (key,) in kinds:
                checkpoint[TYPES[key]] = type(checkpoint[key])


def _is_of_omegaconf(value: Any) -> bool:
    kind = type(value)
    return kind.__name__ in _OF_OMEGACONF and kind.__module__.partition(".")[0] == "omegaconf"


def _described(value: Any, at: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    kind = {"at": list(at), "kind": type(value).__name__}
    if _is_of_omegaconf(value):
        yield {**kind, **{flag: value._get_node_flag(flag) for flag in _FLAGS}}
    elif isinstance(value, Namespace):
        yield kind
        yield from _described(vars(value), at)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _described(each, (*at, key_of(key)))
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _described(each, (*at, index))


def _restored(value: Any, at: tuple[Any, ...], kinds: Mapping[tuple[Any, ...], Mapping[str, Any]]) -> Any:
    if isinstance(value, dict):
        value = {key: _restored(each, (*at, key), kinds) for key, each in value.items()}
    elif isinstance(value, (list, tuple)):
        value = type(value)(_restored(each, (*at, index), kinds) for index, each in enumerate(value))
    if (of := kinds.get(at)) is None:
        return value
    if of["kind"] == "Namespace":
        return Namespace(**value)
    try:
        from omegaconf import OmegaConf  # noqa: PLC0415 - optional
    except ImportError:
        rank_zero_warn(
            f"hyperparameters {'.'.join(map(str, at))} were OmegaConf's, which is not installed here: they are plain"
        )
        return value
    config = OmegaConf.create(value)
    for flag in _FLAGS:
        config._set_flag(flag, of[flag])
    return config
