"""The outcome of a flow: of its run on one device, and of its runs under the strategy in each layout."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from tools.flows.ranks import LAYOUTS, USUAL, alarm, reference, sharded
from tools.flows.registry import Flow
from tools.models.outcome import worst
from tools.models.worlds import Pools, answer_of


def answer(pools: Pools, flow: Flow, layouts: Sequence[str] = USUAL) -> dict[str, Any]:
    """Return the outcome of a flow, the worst of all layouts: of its own, where it is for some alone."""
    layouts = flow.layouts or layouts
    with tempfile.TemporaryDirectory(prefix="flows-") as folder:
        found = answer_of(pools(1), reference, flow, folder)
        if found["outcome"] != "ran":
            return found
        return worst([answer_of(pools(LAYOUTS[layout][0]), sharded, flow, layout, folder) for layout in layouts])


def alarms(pools: Pools, flow: Flow, precision: str, layouts: Sequence[str] = USUAL) -> dict[str, Any]:
    """Return what of a flow is refused, or not, in another precision: the first layout that does not run, if there is one.

    "not compared" where plain Lightning does not run it there.
    """
    found: dict[str, Any] = {"outcome": "ran"}
    for layout in flow.layouts or layouts:
        with tempfile.TemporaryDirectory(prefix="flows-") as folder:
            found = answer_of(pools(LAYOUTS[layout][0]), alarm, flow, layout, folder, precision)
            if found["outcome"] != "ran":
                alone = answer_of(pools(1), reference, flow, folder, precision)
                return {**found, "why": f"{layout}: {found['why']}"} if alone["outcome"] == "ran" else alone
    return found
