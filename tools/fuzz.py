"""Drawn damage for an hour: files that are cut, flipped and made up, and options of any value, each round by other seeds.

    make fuzz                        an hour, or until something is found
    make fuzz ARGS="--minutes 5"     less

Runs the tests of files and options that draw their cases (Hypothesis) again and again, 2,000 cases of each a round.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

TESTS = ("tests/checkpoint", "tests/text", "tests/data", "tests/test_drawn_options.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 where a case was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    options = parser.parse_args(argv)
    begin, rounds, found = time.monotonic(), 0, 0
    with tqdm(total=round(options.minutes), unit="min") as bar:
        while not found and (minutes := (time.monotonic() - begin) / 60) < options.minutes:
            bar.update(int(minutes) - bar.n)
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-m",
                "hypothesis",
                "--hypothesis-profile=long",
                "--timeout",
                "3600",
            ]
            ended = subprocess.run(
                [*command, f"--hypothesis-seed={options.seed + rounds}", *TESTS], capture_output=True, text=True, check=False
            )  # fmt: skip
            rounds += 1
            if ended.returncode:
                found = ended.returncode
                print(ended.stdout[-8000:], ended.stderr[-2000:])
    minutes = (time.monotonic() - begin) / 60
    print(
        f"{rounds} rounds in {minutes:.0f} min, the last by seed {options.seed + rounds - 1}: {'found' if found else 'nothing was found'}"
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
