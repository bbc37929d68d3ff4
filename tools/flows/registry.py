"""The flows that are tried: each script of tests/flows, in folders by topic."""

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
        topic: its folder.
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
        return importlib.import_module(f"tests.flows.{self.topic}.{self.name}")


def flows() -> list[Flow]:
    """Return every flow, topic by topic."""
    return [
        Flow(file.parent.name, file.stem) for file in sorted(FOLDER.glob("*/*.py")) if not file.stem.startswith("_")
    ]
