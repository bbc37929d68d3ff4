"""Checkpoints without the frozen parameters that building the model gives again: the base of a LoRA.

                   built       trained, thawed, loaded, averaged       saved                      loaded
    frozen         digest A                                            digest A: left out         built again: digest A, or refused
                   digest B    another value                           not B: saved whole         read
    trained        -                                                   saved whole                read

The first digests are the module's: of what the user's code built, before any checkpoint was loaded. They stay for every later Trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_sp import comm
from lightning_sp.checkpoint.contents.state import model_state
from lightning_sp.checkpoint.contents.tensor_digest import tensor_digest, tensor_digests
from lightning_sp.checkpoint.folders.address import Location
from lightning_sp.errors import SequenceParallelError
from lightning_sp.parameter_names import shown, user_name
from lightning_sp.weights.quantized import is_quantized, quantized_weights

# The entry of a checkpoint about what was left out: for each of the entries below, shape, dtype and digest by name.
EXCLUDED = "lightning_sp_excluded"
# The entries of a checkpoint that hold a whole model: its weights, and what Lightning's `WeightAveraging` was averaging.
_MODELS = ("state_dict", "current_model_state")
_WHY = "quantized, or by exclude_frozen_parameters=True"
# The attribute of a module with the digests of what its user's code built.
_BUILT = "_lightning_sp_built_digests"


def note_built(module: nn.Module, group: ProcessGroup | None) -> None:
    """Keep the digests of the frozen parameters of a module that has just been sharded. Every rank must call it.

    Communicates: what `tensor_digests` does.
    """
    frozen = _frozen(module)
    digests = tensor_digests(frozen, group)
    setattr(module, _BUILT, {name: (each.dtype, digests[name]) for name, each in frozen.items()})


def is_built_noted(module: nn.Module) -> bool:
    """Return whether it is known what the user's code built: no other Trainer has sharded the module without asking."""
    return _BUILT in vars(module)


def exclude_frozen(checkpoint: dict[str, Any], module: nn.Module, group: ProcessGroup | None) -> None:
    """Take what the user's code built, and nobody has changed, out of a checkpoint. Every rank must call it.

    Args:
        checkpoint: of the module, as hooks and callbacks have left it; it is changed.
        module: resharded.
        group: the world, on a backend for host objects.

    Communicates: what `tensor_digests` does.
    """
    built: Mapping[str, tuple[torch.dtype, str | None]] = vars(module).get(_BUILT, {})
    frozen = {name: each for name, each in _frozen(module).items() if name in built}
    stored = {
        (entry, name): value
        for entry in _MODELS
        for name, value in _tensors(checkpoint.get(entry)).items()
        if name in frozen and value.shape == frozen[name].shape
    }
    compared = {f"{entry} {name}": value for (entry, name), value in stored.items()}
    for (entry, name), value in stored.items():
        if value.dtype != built[name][0]:  # an average has a dtype of its own: what was built, in that dtype
            compared[f"now {name}"] = frozen[name]
            compared[f"{entry} {name} as it is now"] = frozen[name].to(value.dtype)
    digests = tensor_digests(compared, group)
    excluded: dict[str, dict[str, Any]] = {}
    for (entry, name), value in stored.items():
        dtype, expected = built[name]
        if value.dtype != dtype:
            unchanged = frozen[name].dtype == dtype and expected is not None and digests[f"now {name}"] == expected
            expected = digests[f"{entry} {name} as it is now"] if unchanged else None
        if expected is not None and digests[f"{entry} {name}"] == expected:
            described = {"shape": list(value.shape), "dtype": value.dtype, "digest": expected}
            excluded.setdefault(entry, {})[name] = described
    for entry, names in excluded.items():
        checkpoint[entry] = {name: value for name, value in checkpoint[entry].items() if user_name(name) not in names}
        checkpoint.setdefault(EXCLUDED, {}).setdefault(entry, {}).update(names)


def exclude_quantized(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Take the quantized weights, which nothing trains, out of a checkpoint: their bytes alone would not be the weights.

    Args:
        checkpoint: of the module; it is changed.
        module: resharded.
    """
    weights = quantized_weights(module)
    for entry in _MODELS if weights else ():
        if names := [name for name in _tensors(checkpoint.get(entry)) if name in weights]:
            excluded = checkpoint.setdefault(EXCLUDED, {}).setdefault(entry, {})
            excluded.update({n: {**weights[n]._asdict(), "shape": list(weights[n].shape)} for n in names})
            beside = tuple(f"{name}." for name in weights)
            checkpoint[entry] = {
                name: value
                for name, value in checkpoint[entry].items()
                if user_name(name) not in weights and not user_name(name).startswith(beside)
            }


def excluded_shapes(checkpoint: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what was left out of a checkpoint's model, by name."""
    return {name: tuple(of["shape"]) for name, of in _excluded(checkpoint).get("state_dict", {}).items()}


def include_frozen(path: Path | str, checkpoint: dict[str, Any], module: nn.Module, group: ProcessGroup | None) -> None:
    """Put a module's own parameters in the places of those that were left out of a checkpoint. Every rank must call it.

    Args:
        path: of the checkpoint, for messages.
        checkpoint: it is changed: its models are whole.
        module: resharded.
        group: the world, on a backend for host objects.

    Communicates: what `tensor_digests` does.

    Raises:
        SequenceParallelError: a parameter is not what was left out, on all ranks.
    """
    excluded = _excluded(checkpoint)
    if not excluded:
        return
    own, weights = _candidates(excluded, module), quantized_weights(module)
    plain = {f"{entry} {name}": value for (entry, name), value in own.items() if name not in weights}
    digests = tensor_digests(plain, group)
    found = {key: weights[key[1]].digest if key[1] in weights else digests[f"{key[0]} {key[1]}"] for key in own}
    comm.agree(_differing(path, excluded, own, found), group)
    _put(checkpoint, own)


def include_frozen_of_whole(checkpoint: dict[str, Any], module: nn.Module, path: object) -> None:
    """Do as `include_frozen` for a module that is not sharded, without a word to other ranks.

    Raises:
        SequenceParallelError: a parameter is not what was left out.
    """
    excluded = _excluded(checkpoint)
    own, weights = _candidates(excluded, module), quantized_weights(module)
    digests = {k: weights[k[1]].digest if k[1] in weights else tensor_digest(value) for k, value in own.items()}
    wrong = _differing(path, excluded, own, digests)
    if wrong:
        raise SequenceParallelError(wrong)
    _put(checkpoint, own)


def refuse_part_of_model(path: Location, checkpoint: Mapping[str, Any], prefix: str) -> None:
    """Refuse to export a model whose base is not in the checkpoint.

    Raises:
        SequenceParallelError: with what exports it.
    """
    excluded = _excluded(checkpoint).get("state_dict", {})
    if names := [name for name in excluded if name.startswith(prefix)]:
        raise SequenceParallelError(
            f"checkpoint {path} leaves out {len(names)} frozen parameters ({_WHY}; {shown(names)}), so it holds no "
            f"whole model under the prefix {prefix!r}: build it with its base, module = YourModule.load_from_checkpoint({str(path)!r}); then "
            "torch.save(module.state_dict(), out), or of PEFT the adapters alone, module.model.save_pretrained(folder)"
        )


def _frozen(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's frozen parameters but the quantized, under each of their names."""
    named = module.named_parameters(remove_duplicate=False)
    return {user_name(n): each.detach() for n, each in named if not each.requires_grad and not is_quantized(each)}


def _tensors(state: Any) -> dict[str, Tensor]:
    values = state.items() if isinstance(state, Mapping) else ()
    return {user_name(name): value for name, value in values if isinstance(value, Tensor)}


def _excluded(checkpoint: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = checkpoint.get(EXCLUDED) or {}
    return found


def _candidates(excluded: Mapping[str, Mapping[str, Any]], module: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Return a module's own tensors that may stand for what was left out, in the dtype that it had.

    Those beside the weights have memory of their own: the weights are loaded first, into the module's.
    """
    state, weights = _tensors(model_state(module)), quantized_weights(module)
    return {
        (entry, name): state[name].detach()
        if name in weights
        else state[name].detach().to(of["dtype"], copy=entry != "state_dict")
        for entry, names in excluded.items()
        for name, of in names.items()
        if name in state and tuple(state[name].shape) == tuple(of["shape"])
    }


def _differing(
    path: object,
    excluded: Mapping[str, Mapping[str, Any]],
    own: Mapping[tuple[str, str], Tensor],
    digests: Mapping[tuple[str, str], str | None],
) -> str | None:
    """Return in words which parameters are not those that were left out, None if all are."""
    for entry, names in excluded.items():
        differing = [name for name, of in names.items() if digests.get((entry, name)) != of["digest"]]
        if not differing:
            continue
        name, of = differing[0], names[differing[0]]
        here = f"{digests[entry, name]} here" if (entry, name) in own else "no such parameter here"
        others = f"; {shown(differing[1:])}" if differing[1:] else ""
        return (
            f"checkpoint {path} leaves out {len(names)} frozen parameters ({_WHY}), which the model that takes it must "
            f"hold bit for bit, and {len(differing)} of them are not those of this model ({name} of {of['dtype']} and "
            f"{tuple(of['shape'])}: digest {of['digest']} there, {here}{others}): build the same base "
            "(from_pretrained of the same files and revision, in the same precision), in a module that was not trained since; what is not "
            "quantized, exclude_frozen_parameters=False saves too"
        )
    return None


def _put(checkpoint: dict[str, Any], own: Mapping[tuple[str, str], Tensor]) -> None:
    for entry in {entry for entry, _ in own}:
        checkpoint[entry] = {**checkpoint[entry], **{name: value for (of, name), value in own.items() if of == entry}}
