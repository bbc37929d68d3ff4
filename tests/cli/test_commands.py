"""The two commands as a user starts them: what they write, and that two processes say what one says."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
SHORT = ["trainer.max_steps=4", "trainer.val_check_interval=4", "trainer.limit_val_batches=2", "experiment=quick"]

SMALL_DATA = ["--data.source", str(ROOT / "lightning_sp" / "*.py"), "--data.sequence_length", "512"]

# Four commands of `lightning-sp` one after the other, which import all once: a fit, then what is done with its checkpoint, elsewhere. The
# other rank is started with the first one's words.
FOUR = """import json, os, sys
from pathlib import Path

import torch.distributed as dist
from lightning_sp.cli import main

if __name__ == "__main__":
    main()
    dist.barrier()  # rank 0 writes the summary
    (run,) = Path("runs/lightning_logs").resolve().iterdir()
    checkpoint = Path(json.loads((run / "summary.json").read_text())["checkpoint"]).resolve()
    Path("after").mkdir(exist_ok=True)
    os.chdir("after")
    for name in ("validate", "test", "predict"):
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("now:", name, flush=True)
        sys.argv[1:] = [name, *json.loads(os.environ["AFTER"]), "--ckpt_path", str(checkpoint)]
        main()
"""


def script(folder, name, function):
    """Write what installing the package writes: Lightning's launcher runs this file again for the other ranks."""
    path = folder / name
    path.write_text(f"from lightning_sp.cli import {function}\n\nif __name__ == '__main__':\n    {function}()\n")
    return path


def start(folder, command, **more):
    """Start a command of the user's."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE", "RANK")
    }
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def output_of(process):
    """Wait for a command that must end well, and return what it printed."""
    output = process.communicate(timeout=560)[0]
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("commands")


@pytest.fixture(scope="module")
def train(folder):
    return script(folder, "lightning-sp-train", "train")


@pytest.fixture(scope="module")
def swept(folder, train):
    """Return the output of a sweep, of which the first job is what `two` does, on one process."""
    jobs = ["seed=0,1", "strategy=single_device", f"hydra.sweep.dir={folder}/sweep"]
    return output_of(start(folder, [sys.executable, train, "--multirun", *SHORT, *jobs]))


@pytest.fixture(scope="module")
def started(folder, train):
    """Start both commands at once, and return their folder, each command's output by name."""
    four = folder / "four"
    four.write_text(FOUR)
    two = ["--trainer.strategy", "sequence_parallel", "--trainer.devices", "2", "--trainer.accelerator", "cpu"]
    limits = [f"--trainer.limit_{kind}_batches={n}" for kind, n in (("val", 2), ("test", 2), ("predict", 1))]
    commands = {
        "two": [sys.executable, train, *SHORT, f"hydra.run.dir={folder}/two"],
        "four": [
            sys.executable,
            four,
            "fit",
            *("--trainer.strategy", "lightning_sp.SequenceParallelStrategy", "--trainer.strategy.ring_size", "2"),
            *("--trainer.devices", "2", "--trainer.accelerator", "cpu", "--trainer.max_steps", "3"),
            *("--trainer.log_every_n_steps", "1", "--trainer.limit_val_batches", "1", *SMALL_DATA),
        ],
    }
    running = {
        name: start(folder, command, AFTER=json.dumps([*two, *SMALL_DATA, *limits]))
        for name, command in commands.items()
    }
    try:
        outputs = {name: output_of(process) for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()  # nothing to one that has ended
    return folder, outputs


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
def test_two_processes_report_what_one_reports(started, swept):
    folder, outputs = started
    one, two = summary(folder / "sweep" / "0"), summary(folder / "two")
    assert two["mesh"] == "dp 1 x ring 1 x ulysses 2"
    assert one["tokens_seen"] == two["tokens_seen"] == 4 * 1024
    assert one["unigram_perplexity"] == pytest.approx(two["unigram_perplexity"], rel=1e-12)
    for name in ("perplexity_before", "perplexity_after"):
        assert two[name] == pytest.approx(one[name], rel=1e-4)
    assert (len(one["peak_memory_bytes"]), len(two["peak_memory_bytes"])) == (1, 2)
    assert outputs["two"].count("What this run did") == 1


def test_a_run_folder_holds_configuration_metrics_picture_and_checkpoint(started):
    folder, _ = started
    run = folder / "two"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["vocab_size"], config["model"]["model"]["vocab_size"]) == (257, 257)
    assert config["data"]["sequence_length"] == 1024
    header = (run / "logs" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train_loss", "val_loss", "val_perplexity", "tokens_per_s", "peak_memory_max_gib"} <= set(header)
    assert (run / "report.png").read_bytes()[:4] == b"\x89PNG"
    assert summary(run)["checkpoint"] == str(run / "checkpoints" / "step-4.ckpt")
    assert (run / "checkpoints" / "step-4.ckpt").is_dir()


@pytest.mark.slow
def test_a_sweep_runs_each_job_once_in_its_folder(folder, swept):
    jobs = sorted(path.name for path in (folder / "sweep").iterdir() if path.is_dir())
    assert jobs == ["0", "1"]
    assert [yaml.safe_load((folder / "sweep" / job / "config.yaml").read_text())["seed"] for job in jobs] == [0, 1]
    assert summary(folder / "sweep" / "0")["perplexity_after"] != summary(folder / "sweep" / "1")["perplexity_after"]
    assert swept.count("What this run did") == 2
    assert swept.count("Launching") == 1


def test_lightnings_cli_fits_with_the_strategy(started):
    folder, _ = started
    (run,) = (folder / "runs" / "lightning_logs").iterdir()
    assert summary(run)["mesh"] == "dp 1 x ring 2 x ulysses 1"
    assert summary(run)["tokens_seen"] == 3 * 512
    assert f"fit --config {run}/config.yaml --ckpt_path" in summary(run)["resume"]
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["strategy"]["init_args"]["ring_size"] == 2


def printed_resume_command(output):
    lines = output.splitlines()
    command = lines[lines.index("resume with:") + 1]
    assert " lightning-sp-train " in command, "relative to the current folder"
    assert "ckpt_path=two/checkpoints/step-4.ckpt" in command
    return command


def test_a_run_ends_with_the_command_that_resumes_it(started):
    assert printed_resume_command(started[1]["two"])


@pytest.mark.slow
def test_the_command_that_a_run_ends_with_resumes_it(started):
    folder, outputs = started
    # As copied from the terminal: one line, its paths relative to where the command was typed.
    resume = [*shlex.split(printed_resume_command(outputs["two"])), f"hydra.run.dir={folder}/resumed"]
    output_of(start(folder, resume))
    before, after = summary(folder / "two"), summary(folder / "resumed")
    assert after["tokens_seen"] > before["tokens_seen"] == 4 * 1024
    assert after["perplexity_after"] < before["perplexity_after"]


def test_lightnings_cli_validates_tests_and_predicts_a_checkpoint(started):
    _, outputs = started
    for name, words in (("validate", "val_perplexity"), ("test", "test_perplexity"), ("predict", "Predicting")):
        _, _, output = outputs["four"].partition(f"now: {name}\n")
        assert words in output.partition("now: ")[0], outputs["four"]
