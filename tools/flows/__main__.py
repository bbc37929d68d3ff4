"""Tries what users do around a model, each script of tests/flows, and writes docs/flows.md.

    python -m tools.flows              every flow
    python -m tools.flows dpo lora     those whose name holds one of the words; the other rows stay
    python -m tools.flows --workers 2  so many at a time, each with worlds of its own

Owns the order of the work; flows, runs and the page are in its siblings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from threading import local

from tqdm import tqdm

from tools.flows.page import PAGE, Row, read_page, row_of, write_page
from tools.flows.registry import Flow, flows
from tools.flows.worlds import answer
from tools.models.worlds import Worlds


def main(words: Sequence[str], num_workers: int, limit_s: float) -> None:
    """Run the flows chosen, then write the page.

    Args:
        words: a flow is chosen when its name holds one of them; none: every flow.
        num_workers: flows at a time.
        limit_s: of one run of a flow.
    """
    every = flows()
    chosen = [flow for flow in every if not words or any(word in flow.name for word in words)]
    if not chosen:
        raise SystemExit(f"no flow's name holds {' or '.join(words)}; there are: {', '.join(f.name for f in every)}")
    found = {(row.topic, row.name): row for row in (read_page(PAGE.read_text()) if PAGE.exists() else [])}
    mine, opened = local(), []

    def run(flow: Flow) -> Row:
        if not hasattr(mine, "worlds"):
            mine.worlds = Worlds(limit_s)
            opened.append(mine.worlds)
        return row_of(flow, answer(mine.worlds, flow))

    with ThreadPool(num_workers) as pool:
        progress = tqdm(pool.imap_unordered(run, chosen), total=len(chosen), file=sys.stdout)
        for row in progress:
            progress.set_postfix_str(f"{row.name}: {row.outcome}")
            found[row.topic, row.name] = row
    for worlds in opened:
        worlds.close()
    write_page([found[flow.topic, flow.name] for flow in every if (flow.topic, flow.name) in found])
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="a part of a flow's name; none: every flow")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="flows at a time; 2")
    parser.add_argument(
        "--limit", type=float, default=120.0, metavar="S", help="seconds that one run of a flow may take; 120"
    )
    arguments = parser.parse_args()
    main(arguments.words, arguments.workers, arguments.limit)
