"""A step on a crop, and on larger ones where that shows nothing: it fails there whole, or no number of it could differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_sp.preflight.crops.crop import Crop
from lightning_sp.preflight.explain.verdict import Agreement
from lightning_sp.preflight.run import TrialFailedError
from lightning_sp.step.runner import StepRunner


def compared_on_crops(
    compared: Callable[[Crop, Crop], Agreement | None],
    crops: tuple[Crop, Crop],
    larger: Sequence[Callable[[Crop], tuple[Crop, Crop] | None]],
    runner: StepRunner,
) -> tuple[Agreement | None, Crop]:
    """Compare on a crop, and where the step fails on it whole, or says nothing there, on larger ones.

    Raises:
        TrialFailedError: it fails on all of them.
    """
    found: Agreement | None = None
    try:
        found = compared(*crops)
        failed = None
    except TrialFailedError as error:
        failed = error
    for make in larger:
        if failed is None and (found is None or found.says_something):
            break
        more = make(crops[0])
        if more is None:
            continue
        crops = more
        runner.start_run()
        try:
            found, failed = compared(*crops), None
        except TrialFailedError as error:
            failed = None if found is not None else error
    if failed is not None:
        raise failed
    return found, crops[0]
