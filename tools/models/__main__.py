"""Tries the models of transformers under the strategy, and writes docs/models.md.

    python -m tools.models                 every model type and head that this version of the package has no answer for yet
    python -m tools.models bert llama      these model types again; the other rows stay
    python -m tools.models --not-exact     what the page does not call exact again
    python -m tools.models --workers 2     so many at a time, each with worlds of its own
    python -m tools.models --precision bf16-mixed
                                           the exact ones in another precision: prints which are refused there, and leaves the page as it is;
                                           --layouts 2x2: in these layouts alone

Each answer is kept at once in .cache/models.json, so a run goes on where another ended. Owns the order of the work; cases, runs and the
page are in its siblings.
"""

from __future__ import annotations

import argparse
import queue
import sys
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from typing import Any

from tqdm import tqdm

from lightning_sp.errors import closest
from tools.models.answers import FILE, Answers, package_version
from tools.models.batches import forms_of
from tools.models.page import PAGE, exact, not_exact, write_page
from tools.models.ranks import LAYOUTS
from tools.models.registry import Case, entries, heads
from tools.models.worlds import Pools, Worlds, alarms, answer

Work = tuple[Case, str]  # a form of a case
Ask = Callable[[Pools, Case, str], dict[str, Any]]


def main(
    words: Sequence[str], num_workers: int, limit_s: float, precision: str | None, layouts: Sequence[str] | None
) -> None:
    """Run what is asked for, then write the page.

    Args:
        words: model types whose rows are renewed; none: every case that this version of the package has no answer for.
        num_workers: cases at a time.
        limit_s: of one training run.
        precision: of the Trainer, to look for false alarms in it; None: write the page.
        layouts: to look for them in; None: all. The page has all.
    """
    if layouts is not None and precision is None:
        raise SystemExit("--layouts is given without --precision: a row of the page is of all layouts")
    cases = [*entries(), *heads()]
    answers = Answers(FILE, package_version())
    known = {case.model_type for case in cases}
    for word in words:
        if word not in known:
            raise SystemExit(
                f"transformers has no model type {word!r} with a class to try{closest(word, sorted(known))}"
            )
    every = [(case, form) for case in cases for form in forms_of(case.kind)]
    if precision is not None:
        chosen = [(case, form) for case, form in every if not words or case.model_type in words]
        ask = partial(alarms, precision=precision, layouts=layouts or tuple(LAYOUTS))
        look_for_alarms(chosen, bool(words), num_workers, limit_s, precision, ask)
        return
    work = [(c, form) for c, form in every if (c.model_type in words if words else answers.of(c, form) is None)]
    run(work, answer, answers.add, num_workers, limit_s)
    write_page(cases, answers)
    print(f"wrote {PAGE}")


def look_for_alarms(
    chosen: list[Work], renewed: bool, num_workers: int, limit_s: float, precision: str, ask: Ask
) -> None:
    """Run the cases that the page calls exact in another precision, and print which are refused there.

    Answers are kept at once in a file of this precision; those that are there are asked again if renewed.
    """
    known = exact()
    answers = Answers(FILE.with_name(f"models-{precision}.json"), package_version())
    asked = [(case, form) for case, form in chosen if (case.model_type, case.kind, form) in known]
    run(
        [(case, form) for case, form in asked if renewed or answers.of(case, form) is None],
        ask,
        answers.add,
        num_workers,
        limit_s,
    )
    found = {f"{case.name}, {form}": answers.every[answers.version][f"{case.name}, {form}"] for case, form in asked}
    others = {name: each for name, each in found.items() if each["outcome"] != "ran"}
    num_compared = sum(each["outcome"] != "not compared" for each in found.values())
    print(f"{len(found)} cases that are exact in float64, in {precision}: {num_compared} compared")
    print("\n".join(f"{name}: {each['outcome']}: {each['why']}" for name, each in sorted(others.items())))


def run(
    work: list[Work],
    ask: Ask,
    note: Callable[[Case, str, dict[str, Any]], None],
    num_workers: int,
    limit_s: float,
) -> None:
    """Run cases, some at a time, each worker in worlds of its own; note each answer."""
    waiting: queue.SimpleQueue[Work] = queue.SimpleQueue()
    for each in work:
        waiting.put(each)
    progress = tqdm(total=len(work), disable=not work, file=sys.stdout)

    def serve() -> None:
        with Worlds(limit_s) as worlds:
            while True:
                try:
                    case, form = waiting.get_nowait()
                except queue.Empty:
                    return
                found = ask(worlds, case, form)
                note(case, form, found)
                progress.set_postfix_str(f"{case.name}: {found['outcome']}")
                progress.update()

    workers = [Thread(target=serve) for _ in range(min(num_workers, len(work)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    progress.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="a model type; none: all that have no answer yet")
    parser.add_argument("--not-exact", action="store_true", help="the types that the page does not call exact")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="cases at a time; 2")
    parser.add_argument(
        "--limit", type=float, default=120.0, metavar="S", help="seconds that one training run may take; 120"
    )
    parser.add_argument("--precision", help="of the Trainer, to look for false alarms in it: 32-true, bf16-mixed")
    parser.add_argument(
        "--layouts", nargs="+", choices=list(LAYOUTS), metavar="UxR", help="with --precision: Ulysses by ring; all"
    )
    arguments = parser.parse_args()
    main(
        [*arguments.types, *(not_exact() if arguments.not_exact else ())],
        arguments.workers,
        arguments.limit,
        arguments.precision,
        arguments.layouts,
    )
