"""Parameters that a user keeps in attributes from before they are sharded: `self.penalised = list(self.model.parameters())`.

Sharding makes new parameters. The old ones would be read on, never trained, without a word: a run finds the new ones in their places, with
what the user has noted on the old ones (`weight._no_weight_decay = True`).
"""

from __future__ import annotations

from typing import Any

from torch import nn

_LIBRARIES = (
    "torch",
    "lightning",
    "pytorch_lightning",
    "lightning_sp",
    "transformers",
    "peft",
    "builtins",
    "torchmetrics",
)
_OF_MODULES = frozenset(vars(nn.Module()))
_DEEPEST = 4


class CapturedParameters:
    """The parameters of a module as they are before they are sharded; a class because their places are looked for once they are.

    Args:
        root: the LightningModule.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        owners = [(module, name, each) for module in root.modules() for name, each in module._parameters.items()]
        # They are held, so that no other object has their number.
        self._owners = {id(each): (module, name, each) for module, name, each in owners if each is not None}

    def renew(self) -> None:
        """Put what the modules hold by now in the place of each, in lists, tuples, dicts and objects that attributes hold."""
        for module, name, before in self._owners.values():
            if (now := module._parameters.get(name)) is not None and now is not before:
                vars(now).update(vars(before))
        seen: set[int] = set()
        for module in self._root.modules():
            own = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
            for name, value in own.items():
                renewed = self._renewed(value, seen, 0)
                if renewed is not value:
                    object.__setattr__(module, name, renewed)

    def _renewed(self, value: Any, seen: set[int], depth: int) -> Any:
        if isinstance(value, nn.Parameter):
            module, name, _ = self._owners.get(id(value), (None, "", None))
            return value if module is None else module._parameters[name]
        if id(value) in seen or depth > _DEEPEST or isinstance(value, (nn.Module, type)):
            return value
        if isinstance(value, tuple):
            parts = [self._renewed(each, seen, depth + 1) for each in value]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        seen.add(id(value))
        if isinstance(value, (list, dict)):
            for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if (renewed := self._renewed(each, seen, depth + 1)) is not each:
                    value[key] = renewed
        elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _LIBRARIES:
            for name, each in list(vars(value).items()):
                renewed = self._renewed(each, seen, depth + 1)
                if renewed is not each:
                    object.__setattr__(value, name, renewed)
        return value
