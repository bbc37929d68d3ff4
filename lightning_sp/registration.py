"""Registers `SequenceParallelStrategy` with Lightning under its name, on `import lightning_sp`.

Owns the class's place in Lightning's registry. Does not own the same name without an import of ours
(lightning_sp_autoload.py, beside the package): what that left in the registry is replaced here by the class.
"""

from __future__ import annotations

import warnings

from lightning.pytorch.strategies import StrategyRegistry

from lightning_sp.strategy import SequenceParallelStrategy

NAME = "sequence_parallel"


def register_strategy() -> None:
    """Make `Trainer(strategy="sequence_parallel")` create the strategy; harmless when repeated.

    A strategy that another package registered under this name is left, with a warning: replacing it would change what
    that package's users get, and the object can always be given.
    """
    registered = StrategyRegistry[NAME]["strategy"] if NAME in StrategyRegistry else None
    owner = getattr(registered, "__module__", "")
    if registered is not None and owner.split(".")[0] not in ("lightning_sp", "lightning_sp_autoload"):
        warnings.warn(
            f"strategy={NAME!r} is registered already, by {owner}, and stays that. Give Lightning the object instead: "
            "Trainer(strategy=lightning_sp.SequenceParallelStrategy()).",
            stacklevel=2,
        )
        return
    StrategyRegistry.register(
        NAME,
        SequenceParallelStrategy,
        description="sequences sharded over devices, exact or refused",
        override=True,
    )
