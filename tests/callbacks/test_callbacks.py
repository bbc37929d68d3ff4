"""What is measured equals what is known: FLOPs against torch's counter, tokens and time against a clock, memory."""

import csv
import dataclasses
import json
import math
import sys

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from lightning_sp.callbacks import AttentionShape, MemoryMonitor, RunReport, ThroughputMonitor
from lightning_sp.callbacks.flops import find_attention_shape, model_flops, num_matrix_parameters, peak_flops
from lightning_sp.callbacks.label_counts import add_counts
from lightning_sp.callbacks.memory import describe_peak, peak_bytes, peak_resident_bytes
from lightning_sp.callbacks.plot import read_curve
from lightning_sp.callbacks.progress_bar import short
from lightning_sp.callbacks.resume_command import shorten_paths
from lightning_sp.callbacks.summary import RunSummary
from lightning_sp.errors import SequenceParallelError
from lightning_sp.models import CausalLM, GPTConfig, HuggingFaceConfig, LlamaConfig
from lightning_sp.text.unigram import unigram_perplexity

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    # Lightning 2.6's own call of torch's pytree.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]

LLAMA = LlamaConfig(vocab_size=32, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=48)
GPT = GPTConfig(vocab_size=32, max_positions=64, dim=32, num_layers=2, num_heads=4)
HUGGING_FACE = HuggingFaceConfig(
    "llama",
    {
        "vocab_size": 32,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "tie_word_embeddings": True,
    },
)


def batch(seed=0, num_rows=2, length=16):
    tokens = torch.randint(0, 32, (num_rows, length + 1), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(length).expand(num_rows, -1)
    return {"input_ids": tokens[:, :-1], "position_ids": positions, "shift_labels": tokens[:, 1:]}


def loader(num_batches, seed=0):
    return DataLoader([batch(seed + index) for index in range(num_batches)], batch_size=None)


def fit(tmp_path, *callbacks, num_batches=6, val=True, ckpt_path=None, **options):
    torch.manual_seed(0)
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "logger": CSVLogger(tmp_path, name="", version="logs"),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
        "num_sanity_val_steps": -1,
    }
    trainer = Trainer(**defaults | options, callbacks=list(callbacks))
    validation = loader(2, seed=50) if val else None
    trainer.fit(CausalLM(LLAMA, max_steps=20, lr=1e-2), loader(num_batches), validation, ckpt_path=ckpt_path)
    return trainer


# FLOPs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LLAMA, GPT, HUGGING_FACE], ids=lambda c: type(c).__name__)
def test_model_flops_are_those_that_torch_counts(config):
    """torch's counter takes causal attention in full: twice what the formula's halved part says."""
    model, rows, length = config.build(), 2, 64
    positions = torch.arange(length).expand(rows, -1)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = model(input_ids=torch.zeros(rows, length, dtype=torch.long), position_ids=positions)
        (output if isinstance(output, torch.Tensor) else output.logits).sum().backward()
    shape = find_attention_shape(model)
    assert shape == AttentionShape(num_layers=2, num_heads=4, head_dim=8)
    num_parameters = num_matrix_parameters(model)
    total = model_flops(num_parameters=num_parameters, attention=shape, num_sequences=rows, sequence_length=length)
    matrices = 6 * num_parameters * rows * length
    counted = counter.get_total_flops()
    if config is HUGGING_FACE:
        assert num_parameters == sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert counted == matrices + 2 * (total - matrices)


def test_tables_that_are_only_looked_up_do_not_count():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3), nn.LayerNorm(3))
    assert num_matrix_parameters(model) == 12
    assert find_attention_shape(model) is None


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16-mixed", 312e12),
        ("NVIDIA H100 80GB HBM3", "bf16-true", 989.5e12),
        ("NVIDIA H100 PCIe", "bf16-mixed", 756e12),
        ("NVIDIA H100 NVL", "bf16-mixed", 835.5e12),
        ("NVIDIA H200", "64-true", 34e12),
        ("NVIDIA B200", "bf16-mixed", 2250e12),
        ("NVIDIA GB200", "bf16-mixed", 2500e12),
        ("NVIDIA H200", "16-mixed", None),
        ("Tesla T4", "bf16-mixed", None),
    ],
)
def test_peak_by_device_and_precision(device, precision, expected):
    assert peak_flops(device, precision) == expected


def test_float32_peak_follows_what_torch_may_use():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert peak_flops("NVIDIA A100-SXM4-40GB", "32-true") == 19.5e12
        torch.set_float32_matmul_precision("high")
        assert peak_flops("NVIDIA A100-SXM4-40GB", "32-true") == 156e12
    finally:
        torch.set_float32_matmul_precision(before)


def test_an_attention_without_heads_is_refused():
    with pytest.raises(SequenceParallelError, match=r"num_heads=0.*at least 1"):
        AttentionShape(num_layers=1, num_heads=0, head_dim=8)


# Throughput ----------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that a step moves by one second and a validation by a hundred."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class TickingLM(CausalLM):
    def __init__(self, clock):
        super().__init__(LLAMA, max_steps=20)
        self.clock = clock

    def training_step(self, batch, batch_idx):
        self.clock.now += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.clock.now += 100
        super().validation_step(batch, batch_idx)


def test_throughput_counts_steps_and_leaves_validation_and_the_first_step_out(tmp_path, monkeypatch):
    clock, monitor = Clock(), ThroughputMonitor()
    monkeypatch.setattr("lightning_sp.callbacks.throughput.time", clock)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        val_check_interval=4,
        logger=CSVLogger(tmp_path, name="", version="logs"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[monitor],
    )
    trainer.fit(TickingLM(clock), loader(8), loader(2))
    assert monitor.tokens_seen == 8 * 32
    # 8 micro-batches of one second: 2 make the first step, 6 are timed.
    assert (monitor.timed_tokens, monitor.timed_s) == (6 * 32, 6.0)
    assert monitor.mean_tokens_per_s == 32.0
    metrics = tmp_path / "logs" / "metrics.csv"
    assert read_curve(metrics, "tokens_per_s").values == [32.0] * 3
    assert read_curve(metrics, "tokens_seen").values == [128.0, 192.0, 256.0]
    assert read_curve(metrics, "tokens_per_s_per_device").values == [32.0] * 3
    flops = model_flops(
        num_parameters=num_matrix_parameters(trainer.lightning_module),
        attention=AttentionShape(2, 4, 8),
        num_sequences=2,
        sequence_length=16,
    )
    assert read_curve(metrics, "model_flops_per_s_per_device").values == pytest.approx([flops] * 3, rel=1e-6)
    assert read_curve(metrics, "mfu").values == []


def test_throughput_counts_on_from_a_checkpoint(tmp_path):
    fit(
        tmp_path / "a",
        ThroughputMonitor(),
        ModelCheckpoint(tmp_path / "kept", "stop"),
        enable_checkpointing=True,
        max_steps=4,
    )
    monitor = ThroughputMonitor()
    fit(tmp_path / "b", monitor, ckpt_path=tmp_path / "kept" / "stop.ckpt", max_epochs=2, num_batches=4)
    assert monitor.tokens_seen == 8 * 32


def test_throughput_refuses_batches_whose_tokens_it_cannot_count(tmp_path):
    class Tensors(CausalLM):
        def training_step(self, batch, batch_idx):
            return self.model.head.weight.sum()

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ThroughputMonitor()],
        limit_val_batches=0,
    )
    with pytest.raises(SequenceParallelError, match=r"batch\['input_ids'\] of shape \(B, S\)"):
        trainer.fit(Tensors(LLAMA), DataLoader([torch.zeros(2, 3)], batch_size=None), loader(1))


# Memory --------------------------------------------------------------------------------------------------------------


def test_peak_resident_memory_grows_by_what_is_held():
    baseline = peak_resident_bytes()
    held = np.ones(300 * 2**20, dtype=np.uint8)
    grown = peak_resident_bytes()
    assert grown >= held.nbytes
    assert grown >= baseline
    del held
    assert peak_resident_bytes() >= grown - 2**20
    assert peak_bytes(torch.device("cpu")) >= grown - 2**20
    assert describe_peak(torch.device("cpu")) == "resident in the process"
    assert "GPU" in describe_peak(torch.device("cuda"))


def test_memory_is_logged_and_kept_for_each_rank(tmp_path):
    monitor = MemoryMonitor()
    fit(tmp_path, monitor)
    (peak,) = monitor.peak_bytes_of_ranks
    assert 2**26 < peak <= peak_resident_bytes()
    logged = tmp_path / "logs" / "metrics.csv"
    assert len(read_curve(logged, "peak_memory_gib").values) == 6
    (least,), (most,) = (read_curve(logged, f"peak_memory_{name}_gib").values for name in ("min", "max"))
    assert least == most == pytest.approx(peak / 2**30, rel=0.05)


# Report --------------------------------------------------------------------------------------------------------------


def test_unigram_perplexity_is_that_of_the_frequencies():
    assert unigram_perplexity(torch.tensor([3, 3, 0, 3, 3])) == pytest.approx(4.0)
    assert unigram_perplexity(torch.tensor([5])) == pytest.approx(1.0)
    shares = [0.75, 0.25]
    assert unigram_perplexity(torch.tensor([30, 10])) == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)))
    assert add_counts(torch.tensor([1, 2]), torch.tensor([1, 0, 4])).tolist() == [2, 2, 4]


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


def summary_of(**values):
    """A summary in which nothing was measured, but for the values given."""
    nothing = dict.fromkeys(field.name for field in dataclasses.fields(RunSummary))
    return RunSummary(**nothing | {"mesh": "mesh", "steps": 1, "peak_memory_bytes": [], "perplexity_step": 0} | values)


def test_summary_of_a_run_that_nothing_measured():
    nothing = summary_of(folder="/home/ada/runs/1")
    assert nothing.ratio_to_unigram is None
    assert nothing.table().row_count == 3
    assert nothing.lines("/home/ada") == ["files:", "runs/1", "checkpoint:", "none written"]


def test_what_is_to_be_copied_stands_whole_in_lines_of_its_own():
    command = (
        f"lightning-sp-train {'trainer.max_steps=80 ' * 6}ckpt_path='/home/ada/with space/{'long' * 30}/step-8.ckpt'"
    )
    summary = summary_of(folder="/home/ada/with space", checkpoint="/elsewhere/step-8.ckpt", resume=command)
    assert summary.lines("/home/ada") == [
        "files:",
        "with space",
        "checkpoint:",
        "/elsewhere/step-8.ckpt",
        "resume with:",
        command.replace("/home/ada/", ""),
    ]


@pytest.mark.parametrize(
    ("text", "shortened"),
    [
        ("/a/b/c", "c"),
        ("/a/b", "/a/b"),
        ("/a/bc/d", "/a/bc/d"),
        ("/x/a/b/c", "/x/a/b/c"),
        ("python /a/b/train.py 'k=[/a/b/x,/a/b/y z]'", "python train.py 'k=[x,y z]'"),
        ("fit(ckpt_path='/a/b/c')", "fit(ckpt_path='c')"),
        ("cd /a/b/ there", "cd /a/b/ there"),
    ],
)
def test_paths_are_shortened_where_they_begin(text, shortened):
    assert shorten_paths(text, "/a/b") == shortened
    assert shorten_paths(text, "/a/b/") == shortened


def test_bar_shows_numbers_at_a_glance():
    assert [short(value) for value in (12345.6, 2.34567, 7, "x")] == ["12,346", "2.35", 7, "x"]
