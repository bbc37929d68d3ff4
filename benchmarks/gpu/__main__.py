"""Every check and figure that wants one GPU, by value, in parts that go on where they were cut off: `make gpu`, or

    python -m benchmarks.gpu                        all parts, about 25 minutes; results in gpu_results/<part>.json
    python -m benchmarks.gpu right tests profile    these; the first two in at most 6 minutes
    python -m benchmarks.gpu steps --flash FA4      by the FlashAttention 4 behind torch's operator (pip install flash-attn-4)
    python -m benchmarks.gpu steps --cases full     the cases that have one of these words in their name
    python -m benchmarks.gpu --device cpu --tiny    anywhere, to see that the kit itself works

A part is a process of its own with a limit of time. What a case gives is written when it is there; a case that has an answer for this commit is
not asked again, one that failed is with `--retry`. Needs torch 2.11 or newer, lightning and pytest; flash-attn where it is installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.kernels import RIGHT, SPEED
from benchmarks.gpu.links import LINKS
from benchmarks.gpu.loss import LOSS
from benchmarks.gpu.part import Case, Part, Row, Setting
from benchmarks.gpu.ranks import RANKS
from benchmarks.gpu.training import PROFILE, STEPS

_CUT_OFF = "the process ended here"


def _pytest(setting: Setting) -> Row:
    which = ["-m", "gpu"] if setting.device == "cuda" else ["-k", "float64 and 2x2 and dense"]
    if setting.device == "cuda" and importlib.util.find_spec("xdist"):
        which += [
            "-n",
            "6",
            "-p",
            "no:benchmark",
        ]  # small blocks leave the device idle; that plugin warns of -n, which is an error here
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *which,
        "tests/gpu/test_emulated_ranks.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FAILED") or " passed" in line]
    return {"right": done.returncode == 0, "says": "; ".join(lines[-6:]) or f"{done.stdout[-300:]}{done.stderr[-300:]}"}


def _tests(setting: Setting) -> Iterator[Case]:
    yield "pytest tests/gpu", partial(_pytest, setting)


PARTS: dict[str, Part] = {
    "right": RIGHT,
    "tests": Part("every layout of four ranks on the one device, through the production code", 200, _tests),
    "ranks": RANKS,
    "profile": PROFILE,
    "loss": LOSS,
    "steps": STEPS,
    "speed": SPEED,
    "links": LINKS,
}


def run_part(part: Part, setting: Setting, file: Path, retry: bool) -> None:
    """Ask each case that has no answer, and write it; what ends the process leaves its name."""
    found: dict[str, Row] = json.loads(file.read_text())["rows"] if file.exists() else {}
    header = {"device": setting.device_name, "torch": torch.__version__, "commit": _commit(), "tiny": setting.tiny}

    def write() -> None:
        file.write_text(json.dumps({**header, "rows": found}, indent=1))

    for name, ask in part.cases(setting):
        if not setting.asks_for(name):
            continue
        if name in found and not (retry and "error" in found[name]):
            continue
        found[name] = {"error": _CUT_OFF}
        write()
        begin = time.perf_counter()
        try:
            row = ask()
        except Exception as error:
            row = {
                "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            }
        found[name] = {**row, "seconds": round(time.perf_counter() - begin, 1)}
        write()
        # A Trainer and its model hold each other: they and their memory go when Python collects, which would be in a later case.
        gc.collect()
        if "CUDA error" in str(row.get("error")):
            sys.exit(1)  # nothing works in this process any more


def table(rows: dict[str, Row]) -> str:
    """Return rows as a table in Markdown."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [["case", *columns], ["---"] * (len(columns) + 1)]
    lines += [[name, *(str(row.get(column, "")) for column in columns)] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _commit() -> str:
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"


def _supervise(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a part in processes of its own until all cases were asked or its time is up, and print its table."""
    limit_s = options.limit or PARTS[name].limit_s
    file, end = options.out / f"{name}.json", time.monotonic() + limit_s
    if file.exists():
        known = json.loads(file.read_text())
        if (known["commit"], known["tiny"]) != (_commit(), options.tiny):
            file.unlink()
    flags = [
        *["--tiny"] * options.tiny,
        *["--retry"] * options.retry,
        *["--cases", *options.cases] * bool(options.cases),
    ]
    flags += ["--flash", options.flash] * bool(options.flash)
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        name,
        "--device",
        options.device,
        "--out",
        str(options.out),
        "--here",
    ]
    print(f"\n## {name}: {PARTS[name].about}\n", flush=True)
    for _ in range(5):  # each time past the case that ended the one before
        try:
            left = end - time.monotonic()
            if subprocess.run([*command, *flags], timeout=max(1.0, left), check=False).returncode == 0:
                break
        except subprocess.TimeoutExpired:
            print(f"cut off after {limit_s} s; the next call goes on\n")
            break
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rows": {}}
    print(table(result["rows"]), flush=True)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 if something is not right, or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes of seconds")
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--retry", action="store_true", help="ask again what failed")
    parser.add_argument(
        "--cases", nargs="+", default=(), metavar="WORD", help="only cases with one of these words in their name"
    )
    parser.add_argument("--limit", type=int, default=0, metavar="S", help="seconds for each part, in place of its own")
    parser.add_argument(
        "--flash", default="", help="what torch.nn.attention.activate_flash_attention_impl takes, FA3 or FA4"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device here; --device cpu --tiny shows that the kit works")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.here:
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        if options.flash:
            torch.nn.attention.activate_flash_attention_impl(options.flash)
        (name,) = options.parts
        setting = Setting(options.device, options.tiny, tuple(options.cases))
        run_part(PARTS[name], setting, options.out / f"{name}.json", options.retry)
        return 0
    print(f"{Setting(options.device, options.tiny).device_name}, torch {torch.__version__}, commit {_commit()}")
    results = [_supervise(name, options) for name in options.parts or PARTS]
    rows = [row for result in results for row in result["rows"].values()]
    wrong = sum("error" in row or row.get("right") is False for row in rows)
    print(f"\n{len(rows)} cases, {wrong} wrong or failed")
    return int(wrong > 0 or not rows)


if __name__ == "__main__":
    sys.exit(main())
