"""Checkpoints under a real Trainer: a resume on any degrees equals the run that was not interrupted; bad ones are refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_sp import SequenceParallelError
from lightning_sp.checkpoint import derived_seed, export_checkpoint
from lightning_sp.checkpoint.contents.check import check_optimizers
from lightning_sp.cli.export_command import export_command
from lightning_sp.testing import max_error
from tests.checkpoint import checkpoint_ranks as ranks
from tests.checkpoint.checkpoint_ranks import DP_RING, ULYSSES_4
from tests.checkpoint.resume_runs import Results, results_of


@pytest.fixture(scope="module")
def results(pools: Any, folder: Path) -> Results:
    return results_of(pools, folder)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def assert_same_end(resumed: dict[str, Any], whole: dict[str, Any], tolerance: float = 1e-12) -> None:
    assert resumed["step"] == whole["step"]
    for name, expected in whole["weights"].items():
        assert max_error(resumed["weights"][name], expected) <= tolerance, name


def test_a_resume_goes_on_as_if_never_stopped(results: Results) -> None:
    whole, resumed = results["folder whole"][0], results["folder resumed"][0]
    assert_same_end(resumed, whole, 0)
    assert results["folder stop"][0]["losses"] + resumed["losses"] == whole["losses"]


@pytest.mark.parametrize(
    "name",
    [
        "to dp 2 x ring 2",
        "to one process",
        slow("to ring 2 x ulysses 2 from a file"),
        slow("to one process from a file"),
    ],
)
def test_a_resume_on_other_degrees_ends_in_the_same_weights(results: Results, name: str) -> None:
    assert_same_end(results[name][0], results["folder whole"][0])


@pytest.mark.parametrize(
    "name", ["folder resumed", "to dp 2 x ring 2", "to one process", slow("to ring 2 x ulysses 2 from a file")]
)
def test_each_sample_of_the_epoch_is_seen_once_across_the_cut(results: Results, name: str) -> None:
    before = results["folder stop"][0]["numbers"]
    after = [n for rank in results[name] if rank["sp_rank"] == 0 for n in rank["numbers"]]
    seen = before + after
    # 8 samples, 4 a step: the first epoch ends after step 2, of 3.
    per_rank = [rank["numbers"] for rank in results[name] if rank["sp_rank"] == 0]
    in_epoch = [n for numbers in per_rank for n in numbers[: 4 // len(per_rank)]]
    assert sorted(before + in_epoch) == list(range(8))
    assert len(seen) == 12


def test_epochs_are_shuffled_differently(results: Results) -> None:
    numbers = results["folder whole"][0]["numbers"]
    assert sorted(numbers[:8]) == list(range(8))
    assert numbers[:4] != numbers[8:12]


@pytest.mark.parametrize(
    "kind", [slow("sgd"), "momentum", slow("groups in bf16-true"), slow("two"), "dropout", slow("stream")]
)
def test_a_resume_is_exact_for(results: Results, kind: str) -> None:
    stops = results[f"{kind} stop" if kind in ("sgd", "two") else f"{kind} whole"]
    for whole, stop, resumed in zip(results[f"{kind} whole"], stops, results[f"{kind} resumed"], strict=True):
        before = stop["saved"]
        assert before["losses"] + resumed["losses"] == whole["losses"]
        assert before["numbers"] + resumed["numbers"] == whole["numbers"]
        assert_same_end(resumed, whole, 0)


def test_dropout_is_in_force_and_differs_between_ranks(results: Results) -> None:
    first = [results[f"{kind} whole"][0]["losses"][0] for kind in ("dropout", "folder")]
    assert abs(first[0] - first[1]) > 1e-6, "more than the layouts' rounding"
    assert derived_seed(5, 2, 0) != derived_seed(5, 2, 1) != derived_seed(5, 3, 0)


def test_other_degrees_draw_from_derived_streams_and_say_so_once(results: Results) -> None:
    said = results["dropout elsewhere"][0]["said"]
    assert said.count("the checkpoint is of 2 ranks (data_parallel_size 1, ring_size 2, ulysses_size 1), of ") == 1
    assert (
        said.count("this run of 2 ranks (data_parallel_size 2, ring_size 1, ulysses_size 1) goes on from step 1 and")
        == 1
    )
    assert "(seed 5, step 1, data-parallel rank, sequence-parallel rank)" in said
    assert "derived" not in results["dropout resumed"][0]["said"]


def test_callbacks_get_their_state_back(results: Results) -> None:
    callback = results["to dp 2 x ring 2"][0]["callback"]
    assert callback["path"] == "a/b"
    assert callback["value"] == 7
    assert callback["tensor"].tolist() == [0, 1, 2]
    assert (callback["batches"], callback["now"]) == (2, 6)


@pytest.mark.slow
def test_no_optimizer_is_stored_and_resumed(results: Results) -> None:
    assert results["no optimizer resumed"][0]["numbers"] != []
    assert len(results["no optimizer resumed"][0]["losses"]) == len(results["no optimizer"][0]["losses"]) == 2


@pytest.mark.slow
def test_plain_lightnings_checkpoint_resumes_here(results: Results) -> None:
    whole, resumed = results["plain whole"][0], results["from plain Lightning"][0]
    assert_same_end(resumed, whole, 1e-10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        slow("stream on other degrees", "data_parallel_size=2 and accumulate_grad_batches=2; this run has 1 and 2"),
        slow("resume of weights", "holds weights alone (save_weights_only=True)"),
        ("another global batch", "micro_batch_size 1 x accumulation 2 x dp 1 = 2 samples a step, but the global batch size of the stored "
         "cursor is 4: at dp 1 these (micro_batch_size, accumulate_grad_batches) do: [(1, 4), (2, 2), (4, 1)]"),
        ("another optimizer", "optimizer 0 of the checkpoint is AdamW, this run's is SGD"),
        ("other groups", "hold [28] parameters, this run's [10, 18]"),
        ("fewer optimizers", "optimizer 0 of the checkpoint is AdamW, this run's is _MockOptimizer"),
        ("another order", "stored with shuffle True, this run has False"),
        slow("from within a plain epoch", "stored within epoch 1, after 2 micro-batches, and holds no data cursor"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_on_all_ranks(results: Results, name: str, message: str) -> None:
    for rank in results[name]:
        assert isinstance(rank, str), "not refused"
        assert message in rank
    assert len(set(results[name])) == 1


def test_another_number_of_optimizers_is_refused() -> None:
    with pytest.raises(
        SequenceParallelError, match="the state of 1 optimizers, configure_optimizers returned 2 in this run"
    ):
        check_optimizers(Path("x"), {"optimizer_states": [{}]}, 2)


@pytest.fixture(scope="module")
def good(pools: Any, folder: Path, results: Results) -> Path:
    """A checkpoint folder of four ranks, beside one that is a file."""
    assert results["folder stop"]
    return folder / "folder"


DAMAGE: dict[str, tuple[str, str]] = {
    "manifest deleted": ("manifest.json", "is half-written: it holds 6 files and no manifest.json"),
    "shard deleted": ("__1_0.distcp", "is damaged: __1_0.distcp ("),
    "shard truncated": ("__2_0.distcp", "is damaged: __2_0.distcp has 100 bytes"),
    "shard flipped": ("__3_0.distcp", "is damaged: the checksum of __3_0.distcp ("),
    "meta flipped": ("meta.pt", "is damaged: the checksum of meta.pt ("),
    "manifest cut": ("manifest.json", "is damaged: manifest.json cannot be read"),
    "newer format": ("manifest.json", "is of format 99, this version of lightning_sp reads 1"),
}


def damaged(good: Path, path: Path, name: str) -> Path:
    shutil.copytree(good, path)
    file = path / DAMAGE[name][0]
    if name.endswith("deleted"):
        file.unlink()
    elif name.endswith("truncated"):
        file.write_bytes(file.read_bytes()[:100])
    elif name.endswith("flipped"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif name == "manifest cut":
        file.write_text(file.read_text()[:-20])
    else:
        file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    return path


@pytest.fixture(scope="module")
def refusals(pools: Any, good: Path, folder: Path) -> dict[str, list[str]]:
    """What two ranks say of bad checkpoints."""
    partial = folder / "unfinished.ckpt.partial"
    shutil.copytree(good, partial)
    (partial / "manifest.json").unlink()
    (folder / "empty").mkdir()
    cut = folder / "cut.ckpt"
    cut.write_bytes((folder / "file.ckpt").read_bytes()[:5000])
    torch.save({"a": torch.ones(1)}, folder / "weights.pt")
    save_file({"a": torch.ones(1)}, folder / "weights.safetensors")
    cases = {name: (str(damaged(good, folder / f"damaged {name}", name)), "") for name in DAMAGE}
    cases |= {
        "missing": (str(folder / "nowhere"), ""),
        "never completed": (str(folder / "unfinished.ckpt"), ""),
        "foreign folder": (str(folder / "empty"), ""),
        "file cut": (str(cut), ""),
        "an export": (str(folder / "weights.pt"), ""),
        "another width": (str(good), json.dumps({"width": 64})),
        "another depth": (str(good), json.dumps({"layers": 3})),
        "a device": ("/dev/null", ""),
        "an address": ("s3://bucket/x.ckpt", ""),
        "a file of it": (str(good / ".metadata"), ""),
        "exported weights": (str(folder / "weights.safetensors"), ""),
        "the folder of all": (str(folder), ""),
    }
    by_rank = pools(2).run(ranks.refusals, list(cases.values()))
    return {name: [rank[i] for rank in by_rank] for i, name in enumerate(cases)}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, message) for name, (_, message) in DAMAGE.items()),
        ("missing", "nowhere does not exist"),
        ("never completed", "was never completed: unfinished.ckpt.partial holds 6 files of a save that did not end"),
        ("foreign folder", "is a folder without a checkpoint in it"),
        ("a device", "/dev/null is no checkpoint: it is neither a folder nor a plain file"),
        ("file cut", "cut.ckpt (5000 bytes) cannot be read: damaged, half-written"),
        ("an export", "is no checkpoint of a Trainer (it has no state_dict and loops)"),
        ("another width", "is of another model: 29 of 29 tensors differ in shape (model.embedding.weight is (61, 32) there and (61, 64) here;"),
        ("another depth", "is of another model: 12 are only in this model (model.layers.2.attention_norm.weight,"),
        ("an address", "checkpoint s3://bucket/x.ckpt cannot be read: "),
        ("a file of it", ".metadata is a file of the checkpoint folder "),
        ("exported weights", "weights.safetensors is no checkpoint of a Trainer but weights: to start from exported weights, load them"),
        ("the folder of all", "is a folder without a checkpoint in it (no manifest.json); give one of those below it: cut.ckpt, damaged "),
    ],
)  # fmt: skip
def test_a_bad_checkpoint_is_refused_by_name_on_all_ranks(
    refusals: dict[str, list[str]], name: str, message: str
) -> None:
    assert message in refusals[name][0]
    assert refusals[name][0] == refusals[name][1]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("source", ["folder", "file.ckpt"])
def test_an_export_loads_into_the_unwrapped_model(results: Results, folder: Path, source: str, suffix: str) -> None:
    weights = results["folder stop"][0]["weights"]
    out = export_checkpoint(folder / source, folder / f"exported{suffix}", prefix="model.")
    state = load_file(out) if suffix == ".safetensors" else torch.load(out)
    model = ranks.tied_gpt().double()
    model.load_state_dict(state, strict=True)
    assert model.head.weight is model.embedding.weight
    for name, weight in weights.items():
        assert torch.equal(state[name.removeprefix("model.")], weight) or source == "file.ckpt"
        assert max_error(state[name.removeprefix("model.")], weight) <= 1e-12
    half = torch.load(export_checkpoint(folder / source, folder / "half.pt", dtype=torch.bfloat16))
    assert half["model.head.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("source", "out", "prefix", "message"),
    [
        ("folder", "x.bin", "", "must end in one of .pt, .safetensors"),
        ("folder", "x.pt", "net.", "no tensor's name begins with 'net.'; prefixes: model."),
        ("damaged shard flipped", "x.pt", "", "the checksum of __3_0.distcp"),
        ("nowhere", "x.pt", "", "does not exist"),
    ],
)
def test_a_bad_export_is_refused(
    refusals: dict[str, list[str]], folder: Path, source: str, out: str, prefix: str, message: str
) -> None:
    with pytest.raises(SequenceParallelError) as caught:
        export_checkpoint(folder / source, folder / out, prefix=prefix)
    assert message in str(caught.value)
    assert not (folder / out).exists()


def test_the_export_command(results: Results, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "command.safetensors"
    assert results["folder stop"]
    export_command([str(folder / "folder"), str(out), "--prefix", "model.", "--dtype", "float32"])
    assert capsys.readouterr().out == f"{out}: {out.stat().st_size} bytes\n"
    assert {value.dtype for value in load_file(out).values()} == {torch.float32}
    with pytest.raises(SystemExit):
        export_command([str(folder / "nowhere"), str(out)])
    assert "lightning-sp export: checkpoint" in capsys.readouterr().err


@pytest.mark.slow
def test_the_data_module_reads_each_window_once_across_a_cut(pools: Any, folder: Path) -> None:
    texts = folder / "texts"
    texts.mkdir()
    for i in range(24):
        (texts / f"{i:02d}.txt").write_bytes(bytes([i]) * 25)
    cut = str(folder / "cut in an epoch")
    before = pools(4).run(
        ranks.epoch_samples, 4, ULYSSES_4, str(texts), {"until": 2, "micro": 2, "accumulate": 2, "save": cut}
    )
    after = pools(4).run(
        ranks.epoch_samples, 4, DP_RING, str(texts), {"until": 6, "micro": 2, "accumulate": 1, "resume": cut}
    )
    first = before[0]["numbers"]
    rest = [n for rank in after if rank["sp_rank"] == 0 for n in rank["numbers"]]
    assert len(first) == 8
    assert sorted(first + rest) == list(range(24))
