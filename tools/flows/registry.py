"""The flows that are tried: each script of tests/flows, by topic and room. A name stands once in a topic."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "flows"


@dataclass(frozen=True)
class Flow:
    """A script.

    Args:
        topic: its folder in tests/flows.
        name: its file, without the ending.
    """

    topic: str
    name: str

    @property
    def title(self) -> str:
        """What a user does there: the script's first line."""
        return (self._module().__doc__ or "").strip().splitlines()[0].rstrip(".")

    @property
    def main(self) -> Callable[..., Any]:
        """`main(batch_size, **options of the Trainer)` -> the trained module, or it and a dict of numbers and tensors."""
        found: Callable[..., Any] = self._module().main
        return found

    @property
    def strategy_options(self) -> dict[str, Any]:
        """Options of the strategy that the flow needs: `STRATEGY` of the script."""
        return dict(getattr(self._module(), "STRATEGY", {}))

    @property
    def layouts(self) -> list[str] | None:
        """The layouts that it is for: `LAYOUTS` of the script; None for the usual ones."""
        found: list[str] | None = getattr(self._module(), "LAYOUTS", None)
        return found

    def _module(self) -> Any:
        (file,) = (FOLDER / self.topic).rglob(f"{self.name}.py")
        return importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def flows() -> list[Flow]:
    """Return every flow, topic by topic."""
    files = [each for each in FOLDER.glob("*/*/*.py") if not each.stem.startswith("_")]
    return sorted((Flow(each.parts[-3], each.stem) for each in files), key=lambda flow: (flow.topic, flow.name))
