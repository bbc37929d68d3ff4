"""The walls of the house: each import contract and the ban on collectives outside `comm` report a violation that is planted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A contract of pyproject.toml -> a file below lightning_sp, or of the benchmarks, and an import that the contract forbids there.
PLANTED = {
    "Layers": ("layout.py", "from lightning_sp.strategy import SequenceParallelStrategy"),
    "Inside config": ("config/memory.py", "from lightning_sp.config import degrees"),
    "Inside attention": ("attention/spec/mask.py", "from lightning_sp.attention.schemes import ring"),
    "Inside data": ("data/batch/digest.py", "from lightning_sp.data.loaders import lazy_loader"),
    "Inside data.batch": ("data/batch/digest.py", "from lightning_sp.data.batch import sharding"),
    "Inside data.batch.contents": (
        "data/batch/contents/media.py",
        "from lightning_sp.data.batch.contents import entries",
    ),
    "Inside text": ("text/tokenizer.py", "from lightning_sp.text import corpus"),
    "Text apart from sequences": ("text/documents.py", "from lightning_sp import layout"),
    "Inside rewrite": ("rewrite/rebind.py", "from lightning_sp.rewrite import flex"),
    "Inside rewrite.staged_heads": (
        "rewrite/staged_heads/structure.py",
        "from lightning_sp.rewrite.staged_heads import module",
    ),
    "Inside rewrite.hugging_face": (
        "rewrite/hugging_face/models.py",
        "from lightning_sp.rewrite.hugging_face import masks",
    ),
    "Inside rewrite.hugging_face.heads": (
        "rewrite/hugging_face/heads/whole_states.py",
        "from lightning_sp.rewrite.hugging_face.heads import give",
    ),
    "Inside rewrite.hugging_face.encoders": (
        "rewrite/hugging_face/encoders/encoder_decoder.py",
        "from lightning_sp.rewrite.hugging_face.encoders import whole_encoder",
    ),
    "Inside rewrite.hugging_face.losses": (
        "rewrite/hugging_face/losses/loss.py",
        "from lightning_sp.rewrite.hugging_face.losses import own_shift",
    ),
    "Inside rewrite.hugging_face.media": (
        "rewrite/hugging_face/media/placement.py",
        "from lightning_sp.rewrite.hugging_face.media import deepstack",
    ),
    "Inside rewrite.hugging_face.positions": (
        "rewrite/hugging_face/positions/position_count.py",
        "from lightning_sp.rewrite.hugging_face.positions import rotary",
    ),
    "Inside preflight": ("preflight/comparison.py", "from lightning_sp.preflight import trial"),
    "Inside preflight.crops": ("preflight/crops/crop.py", "from lightning_sp.preflight.crops import shared_crop"),
    "Inside preflight.explain": (
        "preflight/explain/verdict.py",
        "from lightning_sp.preflight.explain import diagnosis",
    ),
    "Inside checkpoint": ("checkpoint/contents/state.py", "from lightning_sp.checkpoint import save"),
    "Inside checkpoint.folders": (
        "checkpoint/folders/folder.py",
        "from lightning_sp.checkpoint.folders import latest",
    ),
    "Inside checkpoint.contents": (
        "checkpoint/contents/state.py",
        "from lightning_sp.checkpoint.contents import frozen",
    ),
    "Inside step": ("step/isolation/snapshot.py", "from lightning_sp.step import runner"),
    "Inside step.isolation": ("step/isolation/traces_in_run.py", "from lightning_sp.step.isolation import snapshot"),
    "Inside parallelize.recomputation": (
        "parallelize/recomputation/copies.py",
        "from lightning_sp.parallelize.recomputation import noted_state",
    ),
    "Inside users_code": ("users_code/ownership.py", "from lightning_sp.users_code import kept_outside"),
    "Inside step.users_numbers": (
        "step/users_numbers/counters.py",
        "from lightning_sp.step.users_numbers import schedules",
    ),
    "Inside preflight.batches": (
        "preflight/batches/earlier_step.py",
        "from lightning_sp.preflight.batches import batches_to_try",
    ),
    "Inside preflight.lengths": (
        "preflight/lengths/by_shapes.py",
        "from lightning_sp.preflight.lengths import untried_length",
    ),
    "Inside global_view.tensors": (
        "global_view/tensors/placement.py",
        "from lightning_sp.global_view.tensors import sequence_tensor",
    ),
    "Inside global_view.calls": (
        "global_view/calls/call.py",
        "from lightning_sp.global_view.calls import taken_tokens",
    ),
    "Inside trainer": ("trainer/loops.py", "from lightning_sp.trainer import sharded_model"),
    "Inside trainer.optimizers": (
        "trainer/optimizers/weight_averaging.py",
        "from lightning_sp.trainer.optimizers import whole_steps",
    ),
    "Inside trainer.processes": (
        "trainer/processes/launchers.py",
        "from lightning_sp.trainer.processes import sigterm",
    ),
    "Inside parallelize.delayed_init": (
        "parallelize/delayed_init/recipes.py",
        "from lightning_sp.parallelize.delayed_init import recorder",
    ),
    "Inside parallelize.tensor_parallel": (
        "parallelize/tensor_parallel/plan.py",
        "from lightning_sp.parallelize.tensor_parallel import split_model",
    ),
    "Inside parallelize": ("parallelize/compilation.py", "from lightning_sp.parallelize import fsdp"),
    "Inside parallelize.activation_offload": (
        "parallelize/activation_offload/disk.py",
        "from lightning_sp.parallelize.activation_offload import pinned_host",
    ),
    "Inside parallelize.fsdp": (
        "parallelize/fsdp/gloo_collectives.py",
        "from lightning_sp.parallelize.fsdp import shard_model",
    ),
    "Inside loss": ("loss/reduction.py", "from lightning_sp.loss import check"),
    "Inside loss.output_head": (
        "loss/output_head/chunked_head.py",
        "from lightning_sp.loss.output_head import deferred_logits",
    ),
    "Inside step.agreement": ("step/agreement/agreed_update.py", "from lightning_sp.step.agreement import replicas"),
    "Inside step.results": ("step/results/predictions.py", "from lightning_sp.step.results import kept_values"),
    "Inside step.resume": ("step/resume/data_cursor.py", "from lightning_sp.step.resume import run_state"),
    "Inside trainer.checkpointing": (
        "trainer/checkpointing/interrupted_saves.py",
        "from lightning_sp.trainer.checkpointing import load_from_checkpoint",
    ),
    "Inside trainer.hooks": ("trainer/hooks/batch_hooks.py", "from lightning_sp.trainer.hooks import batch_end_hooks"),
    "Inside trainer.logged_numbers": (
        "trainer/logged_numbers/logged_sums.py",
        "from lightning_sp.trainer.logged_numbers import row_metrics",
    ),
    "Inside parallelize.tiles": (
        "parallelize/tiles/structure.py",
        "from lightning_sp.parallelize.tiles import of_blocks",
    ),
    "Inside parallelize.memory": (
        "parallelize/memory/memory_budget.py",
        "from lightning_sp.parallelize.memory import model_bytes",
    ),
    "Inside parallelize.fsdp.units": (
        "parallelize/fsdp/units/object_outputs.py",
        "from lightning_sp.parallelize.fsdp.units import model_parts",
    ),
    "Inside parallelize.fsdp.gathers": (
        "parallelize/fsdp/gathers/gather_dtypes.py",
        "from lightning_sp.parallelize.fsdp.gathers import watched_gathers",
    ),
    "Inside parallelize.fsdp.dtensor": (
        "parallelize/fsdp/dtensor/sharded_parts.py",
        "from lightning_sp.parallelize.fsdp.dtensor import sharded_tensors",
    ),
    "Inside preflight.evaluation": (
        "preflight/evaluation/outputs.py",
        "from lightning_sp.preflight.evaluation import evaluation_runs",
    ),
    "Inside preflight.indices": (
        "preflight/indices/padding.py",
        "from lightning_sp.preflight.indices import part_indices",
    ),
    "Inside preflight.differences": (
        "preflight/differences/groups.py",
        "from lightning_sp.preflight.differences import rounding",
    ),
    "Inside global_view.exchange": (
        "global_view/exchange/movement.py",
        "from lightning_sp.global_view.exchange import lines",
    ),
    "Inside global_view.masks": (
        "global_view/masks/known_numbers.py",
        "from lightning_sp.global_view.masks import bands",
    ),
    "Inside global_view.user_functions": (
        "global_view/user_functions/functions_of_tokens.py",
        "from lightning_sp.global_view.user_functions import autograd_functions",
    ),
    "Inside global_view.rules.along_sequence": (
        "global_view/rules/along_sequence/reductions.py",
        "from lightning_sp.global_view.rules.along_sequence import norms",
    ),
    "Inside global_view.rules.attention": (
        "global_view/rules/attention/written_attention.py",
        "from lightning_sp.global_view.rules.attention import scores",
    ),
    "Inside global_view.rules.indexing": (
        "global_view/rules/indexing/chosen.py",
        "from lightning_sp.global_view.rules.indexing import taking",
    ),
    "Inside reductions": ("reductions/scope.py", "from lightning_sp.reductions import whole"),
    "Inside global_view.rules": (
        "global_view/rules/pointwise.py",
        "from lightning_sp.global_view.rules import products",
    ),
    "Inside global_view.compiled": (
        "global_view/compiled/saved.py",
        "from lightning_sp.global_view.compiled import local_graph",
    ),
    "Inside global_view": ("global_view/tensors/placement.py", "from lightning_sp.global_view import table"),
    "Inside context": ("context/dropout.py", "from lightning_sp.context import step"),
    "Inside comm": ("comm/groups.py", "from lightning_sp.comm.cpu import pipes"),
    "Inside comm.hangs": ("comm/hangs/report.py", "from lightning_sp.comm.hangs import watch"),
    "Inside comm.meetings": (
        "comm/meetings/circular_waits.py",
        "from lightning_sp.comm.meetings import failing_together",
    ),
    "Inside benchmarks": ("benchmarks/instruments/written.py", "from benchmarks.steps import scale"),
    "Inside benchmarks.attention": ("benchmarks/attention/overlap.py", "from benchmarks.attention import stages"),
    "Inside benchmarks.memory": ("benchmarks/memory/options.py", "from benchmarks.memory import linear_loss"),
    "Inside benchmarks.steps": ("benchmarks/steps/training.py", "from benchmarks.steps import overhead"),
    "Inside benchmarks.instruments": (
        "benchmarks/instruments/traffic.py",
        "from benchmarks.instruments import resident",
    ),
    "Lightning in its rooms": ("loss/check.py", "from lightning.pytorch import Trainer"),
}
COLLECTIVES = {
    "module": "import torch.distributed as dist\n\ndist.all_reduce(None)\n",
    "function": "from torch.distributed import all_to_all_single\n\nall_to_all_single(None, None)\n",
    "group": "import torch\n\ntorch.distributed.new_group()\n",
    "functional": "from torch.distributed import _functional_collectives as funcol\n\nfuncol.all_gather_tensor\n",
}


def in_clone(file: str) -> str:
    return file if file.startswith("benchmarks/") else f"lightning_sp/{file}"


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """What lint-imports says of each contract, for a copy of the package with all violations at once."""
    folder = tmp_path_factory.mktemp("house")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for package in ("lightning_sp", "benchmarks"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, line in PLANTED.values():
        target = folder / in_clone(file)
        target.write_text(f"{target.read_text()}\n{line}\n")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stdout + found.stderr
    return dict(re.findall(r"^(\S.*?) (KEPT|BROKEN)\b", found.stdout, re.MULTILINE)), found.stdout


def test_every_contract_has_a_violation(verdicts):
    assert set(verdicts[0]) == set(PLANTED)


@pytest.mark.parametrize("contract", PLANTED)
def test_a_planted_import_breaks_its_contract(verdicts, contract):
    broken, said = verdicts
    assert broken[contract] == "BROKEN"
    file, line = PLANTED[contract]
    module = in_clone(file).removesuffix(".py").replace("/", ".")
    assert re.search(rf"^ *-? *{re.escape(module)} -> ", said, re.MULTILINE), f"{line} of {module} is not named"


def collective_findings(text: str, file: str) -> str:
    command = [str(Path(sys.executable).parent / "ruff"), "check", "--quiet", "--no-cache", "--select", "TID251"]
    found = subprocess.run(
        [*command, "--stdin-filename", file, "-"], cwd=ROOT, input=text, capture_output=True, text=True, check=False
    )
    assert found.returncode in (0, 1), found.stderr
    return found.stdout


@pytest.mark.parametrize("form", COLLECTIVES)
def test_a_collective_outside_its_room_is_found(form):
    assert "TID251" in collective_findings(COLLECTIVES[form], "lightning_sp/loss/reduction.py")
    assert collective_findings(COLLECTIVES[form], "lightning_sp/comm/collectives.py") == ""
