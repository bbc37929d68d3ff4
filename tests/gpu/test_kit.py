"""The kit for a GPU, on the CPU: every part runs in tiny sizes, goes on where it was cut off, and finds waits that are planted."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.gpu import __main__ as kit
from benchmarks.gpu.part import Part, Setting
from benchmarks.gpu.timeline import Gap, Span, busy_us, gaps

TINY = ["--device", "cpu", "--tiny"]
RUN = "import sys; from benchmarks.gpu.__main__ import main; [main([p, '--here', *sys.argv[2:]]) for p in sys.argv[1].split()]"


@pytest.mark.slow
def test_every_part_answers_all_its_cases(tmp_path):
    parts = ["right", "profile", "loss", "steps", "speed", "ranks"]
    command = [sys.executable, "-c", RUN, " ".join(parts), *TINY, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for part in parts:
        found = json.loads((tmp_path / f"{part}.json").read_text())
        assert found["tiny"]
        assert [*found["rows"]] == [name for name, _ in kit.PARTS[part].cases(Setting("cpu", True))]
        for name, row in found["rows"].items():
            assert "error" not in row, (name, row)
            assert row.get("right", True), (name, row)
    steps = json.loads((tmp_path / "steps.json").read_text())["rows"]
    assert {row["policy"] for row in steps.values()} == {"none", "selective", "full"}
    assert kit.table(steps).splitlines()[0].startswith("| case | policy | s | tokens/s |")


def test_a_part_goes_on_behind_what_ended_its_process(tmp_path, monkeypatch):
    asked = []

    def cases(_):
        yield "first", lambda: asked.append("first") or {"value": 1}
        yield "ends the process", lambda: os._exit(9)
        yield "last", lambda: asked.append("last") or {"value": 3}

    part, file = Part("of this test", 30, cases), tmp_path / "part.json"
    pid = os.fork()
    if pid == 0:
        kit.run_part(part, Setting("cpu", True), file, retry=False)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    kit.run_part(part, Setting("cpu", True), file, retry=False)
    rows = json.loads(file.read_text())["rows"]
    assert asked == ["last"]
    assert rows["first"]["value"] == 1
    assert "ended" in rows["ends the process"]["error"]


def test_a_failure_is_a_row_and_the_exit_status(tmp_path, capsys):
    def cases(_):
        yield "fails", lambda: 1 / 0

    kit.run_part(Part("of this test", 30, cases), Setting("cpu", True), tmp_path / "part.json", retry=True)
    assert (
        json.loads((tmp_path / "part.json").read_text())["rows"]["fails"]["error"]
        == "ZeroDivisionError: division by zero"
    )
    with pytest.raises(SystemExit):
        kit.main(["right"])  # a GPU, which is not here
    assert "--device cpu --tiny" in capsys.readouterr().err


@pytest.mark.slow
def test_two_ranks_of_one_device_and_the_table(tmp_path, capsys):
    assert kit.main(["links", *TINY, "--out", str(tmp_path)]) == 0
    assert "| all_reduce of two ranks on one device | True |" in capsys.readouterr().out
    assert kit.main(["links", *TINY, "--out", str(tmp_path)]) == 0  # known already


def test_a_wait_of_the_host_is_found_in_the_gap_that_it_makes():
    kernels = [Span(0, 100, "a"), Span(20, 50, "another stream"), Span(180, 300, "b"), Span(310, 400, "c")]
    host = [Span(90, 170, "cudaStreamSynchronize"), Span(80, 175, "aten::item"), Span(301, 309, "aten::add")]
    assert busy_us(kernels) == 100 + 120 + 90
    assert gaps(kernels, host, 20) == [Gap(100, 180, "cudaStreamSynchronize")]
    assert gaps(kernels, host, 5) == [Gap(100, 180, "cudaStreamSynchronize"), Gap(300, 310, "")]
