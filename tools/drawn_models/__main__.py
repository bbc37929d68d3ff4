"""Draws small models and trains each under the strategy and on one device: exact, or refused by name.

    make drawn                            200 models, each in one of three layouts
    make drawn ARGS="--models 20 --seed 7000"
                                          so many, from that seed on; the same seed is the same model

A model that plain Lightning cannot train is not compared. Ends with 1 where a model was wrong or crashed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence

from tqdm import tqdm

from tools.drawn_models.flow import DrawnFlow
from tools.flows import ranks
from tools.models.worlds import Worlds, answer_of

LIMIT_S = 150.0
# Of one sequence each: a loss that mixes rows is another one where data-parallel ranks have some of them, as with DDP.
LAYOUTS = ("ulysses 2", "ring 2", "ulysses 2 x ring 2")


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of the first one")
    options = parser.parse_args(argv)
    outcomes: Counter[str] = Counter()
    with Worlds(LIMIT_S) as pools:
        for seed in tqdm(range(options.seed, options.seed + options.models), unit="model"):
            layout = LAYOUTS[seed % len(LAYOUTS)]
            flow = DrawnFlow(seed)
            with tempfile.TemporaryDirectory() as folder:
                answer = answer_of(pools(1), ranks.reference, flow, folder)
                if answer["outcome"] == "ran":
                    answer = answer_of(pools(ranks.LAYOUTS[layout][0]), ranks.sharded, flow, layout, folder)
            outcomes[answer["outcome"]] += 1
            if answer["outcome"] != "exact":
                tqdm.write(f"{seed}, {layout}: {flow.title}: {answer['outcome']}: {answer.get('why', '')[:600]}")
    print(", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common()))
    return int(bool(outcomes["wrong"] or outcomes["crash"]))


if __name__ == "__main__":
    sys.exit(main())
