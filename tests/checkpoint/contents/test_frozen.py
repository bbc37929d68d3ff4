"""`exclude_frozen_parameters`: a checkpoint of adapters alone resumes as one of all parameters does, and loses nothing that was trained."""

from __future__ import annotations

import shutil
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks

from lightning_sp import SequenceParallelError, export_checkpoint
from lightning_sp.testing import max_error
from tests.checkpoint.contents import frozen_ranks as ranks
from tests.checkpoint.contents.frozen_ranks import LEAVES_OUT
from tests.slow import slow

ADAPTER = {"model.adapter.0.weight", "model.adapter.1.weight"}
ULYSSES, RING, GROUPS = dict(ulysses_size=2), dict(ring_size=2), dict(data_parallel_size=2)
WHOLE = dict(preflight=False)


def call(name: str, *args: Any, **options: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    return name, args, options


def same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 0) -> None:
    assert not found["error"], found["error"]
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert max_error(found["weights"][name], weight) <= tolerance, name


def body_bytes(found: dict[str, Any]) -> int:
    return sum(weight.numel() * 8 for name, weight in found["weights"].items() if "body" in name)


LAYOUTS = {"ulysses": ULYSSES, "ring": RING, "groups": {**GROUPS, "shard_size": 1}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "as_folder"),
    [
        pytest.param(layout, form == "folder", id=f"{name}-{form}")
        for name, layout in LAYOUTS.items()
        for form in ("folder", "file")
    ],
)
def test_adapters_alone_are_saved_and_resumed_at_any_degrees(pools, tmp_path, layout, as_folder):
    path, whole = str(tmp_path / "adapters"), str(tmp_path / "whole")
    micro = 1 if "data_parallel_size" in layout else 2
    of = dict(save_distributed_checkpoint=as_folder)
    others = [(ULYSSES, 2), ({**RING, "shard_size": 1}, 2), (GROUPS, 1)]
    answers = pools(2).run(
        ranks.several,
        [
            call("run", {**layout, **WHOLE}, micro=micro),
            call("run", {**layout, **LEAVES_OUT, **of}, micro=micro, steps=2, save=path),
            call("run", {**layout, **WHOLE, **of}, micro=micro, steps=2, save=whole),
            call("run", {**layout, **LEAVES_OUT}, micro=micro, resume=path),
            # What was left out is known when it is read, whatever this run saves.
            *(call("run", {**other, **WHOLE}, micro=rows, resume=path) for other, rows in others),
        ],
    )
    for uninterrupted, stopped, _, resumed, *elsewhere in answers:
        same(resumed, uninterrupted)
        assert set(stopped["optimized"]) == ADAPTER
        for each in elsewhere:
            same(each, uninterrupted, 1e-12)
    assert ranks.stored(path)[0] == ADAPTER
    assert all(name.startswith("model.body.") for name in ranks.stored(path)[1])
    assert (
        ranks.size_bytes(path) < 0.5 * body_bytes(uninterrupted) < body_bytes(uninterrupted) < ranks.size_bytes(whole)
    )


ATTACKS: dict[str, dict[str, Any]] = {
    "trained for a step, by plain SGD, and frozen again": dict(module=dict(optimizer="SGD", happens="trained for a step")),
    "rows exchanged by a hook": dict(module=dict(happens="rows exchanged")),
    "signs changed by a hook": dict(module=dict(happens="signs changed")),
    "trained in an earlier fit": dict(before=LEAVES_OUT),
    "trained in an earlier fit without the option": dict(before=WHOLE),
    "resumed from another whole checkpoint": dict(resume="other"),
}  # fmt: skip


# Of what a hook does to weights, and of a fit before, one each.
QUICK = (
    "trained for a step, by plain SGD, and frozen again",
    "trained in an earlier fit",
    "resumed from another whole checkpoint",
)


def attacked(pools, folder, layouts, names=tuple(ATTACKS)):
    """What each attack ended with on each rank, and what a new module has of its checkpoint."""
    found: dict[str, list[Any]] = {}
    for layout in layouts:
        calls = [call("run", {**layout, **WHOLE}, module=dict(seed=2), steps=2, save=str(folder / "other"))]
        for name in names:
            options = ATTACKS[name]
            of = {key: str(folder / value) if key == "resume" else value for key, value in options.items()}
            of["before"] = {**layout, **of["before"]} if of.get("before") else None
            path = str(folder / f"{name} {len(found)}")
            calls += [call("run", {**layout, **LEAVES_OUT}, save=path, **of), call("restored", RING, path)]
        answers = pools(2).run(ranks.several, calls)
        for number, name in enumerate(names):
            found.setdefault(name, []).extend((rank[1 + 2 * number], rank[2 + 2 * number]) for rank in answers)
    return found


@pytest.fixture(scope="module")
def attacked_on_a_ring(pools, tmp_path_factory):
    """Return by name what came of it: of those of `make test` together, of the others when one of them is asked for."""

    @cache
    def of(names):
        return attacked(pools, tmp_path_factory.mktemp("attacks"), [RING], names)

    others = tuple(name for name in ATTACKS if name not in QUICK)
    return lambda name: of(QUICK if name in QUICK else others)[name]


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in ATTACKS if name not in QUICK))])
def test_what_was_trained_is_saved_although_it_is_frozen(attacked_on_a_ring, name):
    answers = attacked_on_a_ring(name)
    assert len(answers) == 2
    for saved, again in answers:
        assert not saved["error"], saved["error"]
        same(again, saved)


@pytest.mark.slow
def test_what_was_trained_is_saved_in_other_layouts(pools, tmp_path):
    for name, answers in attacked(pools, tmp_path, [ULYSSES, LAYOUTS["groups"]]).items():
        for saved, again in answers:
            assert not saved["error"], (name, saved["error"])
            same(again, saved)


def test_what_a_hook_writes_to_the_checkpoint_is_saved(pools, tmp_path):
    path = str(tmp_path / "merged")
    calls = [
        call("run", {**RING, **LEAVES_OUT}, module=dict(happens="merged at the save"), steps=2, save=path),
        call("restored", ULYSSES, path),
    ]
    for saved, again in pools(2).run(ranks.several, calls):
        names = [name for name, each in again["weights"].items() if max_error(each, saved["weights"][name])]
        assert len(names) == 1
        assert torch.equal(again["weights"][names[0]], saved["weights"][names[0]] * 2)


@pytest.fixture(scope="module")
def adapters(pools, tmp_path_factory):
    """A checkpoint of adapters alone, and the weights that it is of."""
    path = str(tmp_path_factory.mktemp("adapters") / "last.ckpt")
    return path, pools(2).run(ranks.several, [call("run", {**RING, **LEAVES_OUT}, steps=2, save=path)])[0][0]


def test_another_base_is_refused_on_all_ranks(pools, adapters):
    calls = [
        call("run", {**ULYSSES, **WHOLE}, module=dict(seed=2), resume=adapters[0]),
        call("restored", ULYSSES, adapters[0], seed=2),
        call("restored", GROUPS, adapters[0], seed=2, strict=False),
    ]
    for answers in pools(2).run(ranks.several, calls):
        for answer in answers:
            assert f"checkpoint {adapters[0]} leaves out 21 frozen parameters" in answer["error"], answer
            assert (
                "21 of them are not those of this model (model.body.embedding.weight of torch.float64"
                in answer["error"]
            )
            assert "build the same base" in answer["error"]
            assert "exclude_frozen_parameters=False" in answer["error"]


def test_a_module_is_loaded_from_adapters_alone(adapters):
    path, saved = adapters
    module = ranks.Module.load_from_checkpoint(path)
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, saved["weights"][name].to(weight.dtype)), name
    with pytest.raises(SequenceParallelError, match="are not those of this model"):
        ranks.Module.load_from_checkpoint(path, seed=2)
    with pytest.raises(SequenceParallelError, match="are not those of this model"):
        ranks.Module.load_from_checkpoint(path, seed=2, strict=False)
    assert "load_state_dict" not in vars(ranks.Module)


def test_an_export_of_a_whole_model_is_refused_with_what_does_it(adapters, tmp_path):
    path, saved = adapters
    with pytest.raises(SequenceParallelError, match=r"leaves out 21 frozen parameters .*load_from_checkpoint"):
        export_checkpoint(path, tmp_path / "model.pt")
    part = torch.load(export_checkpoint(path, tmp_path / "adapter.pt", prefix="model.adapter."))
    assert torch.equal(part["0.weight"], saved["weights"]["model.adapter.0.weight"])


@pytest.mark.skipif(not hasattr(callbacks, "EMAWeightAveraging"), reason="this Lightning has no EMAWeightAveraging")
@pytest.mark.parametrize(
    "as_folder", [pytest.param(True, id="folder", marks=pytest.mark.slow), pytest.param(False, id="file")]
)
def test_an_average_is_resumed_from_adapters_alone(pools, tmp_path, as_folder):
    path, whole = (str(tmp_path / name / "step=2.ckpt") for name in ("adapters", "whole"))
    of = dict(save_distributed_checkpoint=as_folder)
    calls = [
        call("run", {**RING, **LEAVES_OUT, **of}, average=True, save=str(tmp_path / "adapters")),
        call("run", {**RING, **WHOLE, **of}, average=True, save=str(tmp_path / "whole")),
        call("run", {**RING, **LEAVES_OUT}, average=True, resume=path),
        call("run", {**RING, **WHOLE}, average=True, resume=path, module=dict(seed=2)),
        call("run", {**ULYSSES, **WHOLE}, average=True, resume=path),
    ]
    for uninterrupted, _, resumed, other, elsewhere in pools(2).run(ranks.several, calls):
        same(resumed, uninterrupted)
        same(elsewhere, uninterrupted, 1e-6)  # Lightning's average is in float32
        assert "are not those of this model" in other["error"]
    # An average of what stays the same is another number, by its rounding: that is saved.
    assert 0.7 * body_bytes(uninterrupted) < ranks.size_bytes(whole) - ranks.size_bytes(path)


def test_a_damaged_list_of_what_is_left_out_is_refused(adapters, tmp_path, pools):
    copy = tmp_path / "copy.ckpt"
    shutil.copytree(adapters[0], copy)
    meta = copy / "meta.pt"
    content = bytearray(meta.read_bytes())
    content[content.index(b"digest")] ^= 1
    meta.write_bytes(content)
    for (answer,) in pools(2).run(ranks.several, [call("restored", RING, str(copy))]):
        assert "the checksum of meta.pt" in answer["error"]
