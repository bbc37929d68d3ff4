"""Write losses.json: ``python -m tests.golden.make``."""

from __future__ import annotations

import json
import platform

import lightning
import torch

from lightning_sp.testing import run_ranks
from tests.golden.ranks import ACCUMULATION, GLOBAL_BATCH, HERE, NUM_STEPS, OPTIONS, SEED, train


def main() -> None:
    """Train on one process and write its losses, with how they were made."""
    [result] = run_ranks(train, 1, (1, 1, 1))
    made = {
        "command": "python -m tests.golden.make",
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "machine": platform.machine(),
        "steps": NUM_STEPS,
        "global_batch": GLOBAL_BATCH,
        "accumulation": ACCUMULATION,
        "seed": SEED,
        "options": OPTIONS,
        "initial_weights_sha256": result["initial"],
    }
    losses = [result["losses"][step] for step in range(NUM_STEPS)]
    (HERE / "losses.json").write_text(json.dumps({"made": made, "losses": losses}, indent=2) + "\n")
    print(f"{NUM_STEPS} losses, {losses[0]:.6f} to {losses[-1]:.6f}")


if __name__ == "__main__":
    main()
