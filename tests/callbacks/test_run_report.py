"""The report of a run: what it writes, prints and remembers."""

import csv
import json
import sys

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_sp.callbacks import MemoryMonitor, RunReport, ThroughputMonitor
from tests.callbacks.runs import batch, fit

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    # Lightning 2.6's own call of torch's pytree.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


def test_report_writes_summary_picture_and_table(tmp_path, capsys):
    report = RunReport(str(tmp_path), resume_command="go --from {checkpoint} --until {max_steps} 'x={y}'")
    checkpoint = ModelCheckpoint(tmp_path / "with space", "step-{step}", auto_insert_metric_name=False)
    trainer = fit(tmp_path, ThroughputMonitor(), MemoryMonitor(), report, checkpoint, enable_checkpointing=True)
    summary = json.loads((tmp_path / "summary.json").read_text())
    labels = torch.cat([batch(50 + index)["shift_labels"].flatten() for index in range(2)])
    shares = torch.bincount(labels).double() / labels.numel()
    shares = shares[shares > 0]
    assert summary["unigram_perplexity"] == pytest.approx(float((-(shares * shares.log()).sum()).exp()))
    assert summary["perplexity_before"] == pytest.approx(32, rel=0.2)
    assert summary["perplexity_after"] == pytest.approx(float(trainer.callback_metrics["val_perplexity"]))
    assert summary["perplexity_step"] == summary["steps"] == 6
    assert summary["tokens_seen"] == 6 * 32
    assert summary["mesh"] == "1 process, SingleDeviceStrategy"
    path = str(tmp_path / "with space" / "step-6.ckpt")
    assert summary["resume"] == f"go --from '{path}' --until 12 'x={{y}}'"
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    assert printed.splitlines()[-6:] == [
        "files:",
        str(tmp_path),
        "checkpoint:",
        path,
        "resume with:",
        summary["resume"],
    ]
    table = "".join(printed.split())
    for text in ("Whatthisrundid", "192in6optimizersteps", f"{summary['perplexity_after']:.2f}after6steps", "ratio"):
        assert text in table
    # The untrained model's metrics stand at step 0.
    with (tmp_path / "logs" / "metrics.csv").open() as file:
        first = next(row for row in csv.DictReader(file) if row["val_perplexity"])
    assert (first["step"], float(first["val_perplexity"])) == ("0", pytest.approx(summary["perplexity_before"]))


def test_a_resumed_report_remembers_what_was_before(tmp_path):
    first, second = RunReport(str(tmp_path / "a")), RunReport(str(tmp_path / "b"))
    fit(tmp_path / "a", first, ModelCheckpoint(tmp_path / "kept", "stop"), enable_checkpointing=True, max_steps=3)
    with pytest.warns(UserWarning, match="no step left to train"):
        fit(tmp_path / "b", second, ckpt_path=tmp_path / "kept" / "stop.ckpt", max_steps=3)
    assert second.summary.perplexity_before == first.summary.perplexity_before
    assert second.summary.unigram_perplexity == first.summary.unigram_perplexity
    assert (
        first.summary.resume
        == f"trainer.fit(..., ckpt_path='{tmp_path / 'kept' / 'stop.ckpt'}'), with Trainer(max_steps=6)"
    )


def test_a_partial_sanity_check_is_not_taken_for_the_perplexity_before(tmp_path, capsys):
    report = RunReport(str(tmp_path))
    fit(tmp_path, report, num_sanity_val_steps=1)
    assert report.summary.perplexity_before is None
    assert "notmeasuredbefore" in "".join(capsys.readouterr().out.split())
    assert report.summary.checkpoint is None
    assert report.summary.resume is None


def test_report_says_why_it_draws_no_picture(tmp_path, monkeypatch):
    with pytest.warns(UserWarning, match="CSVLogger, and there is none"):
        fit(tmp_path / "a", RunReport(str(tmp_path / "a")), logger=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.warns(UserWarning, match=r"needs matplotlib: pip install 'lightning-sp\[plot\]'"):
        fit(tmp_path / "b", RunReport(str(tmp_path / "b")))
    assert not list(tmp_path.rglob("report.png"))
    assert len(list(tmp_path.rglob("summary.json"))) == 2
