from __future__ import annotations

import gc
import os
import time
from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import tests.processes  # noqa: F401, before Lightning is imported
from lightning_sp.testing import RankPool

# Ranks and tests share a few cores: how long one example takes says nothing.
settings.register_profile("default", deadline=None)
settings.load_profile("default")
# `make test-long` chooses it.
settings.register_profile("long", max_examples=2000, deadline=None)


# Of a call: a minute on two idle cores. Less than a test's (pyproject.toml), so that it is the pool that says which ranks did not answer.
TIMEOUT_S = 480.0
# Of all ranks: "cuda" has them share a GPU, to find by hand what a device does otherwise; tests that hold CPU tensors fail there.
DEVICE = os.environ.get("LIGHTNING_SP_TEST_DEVICE", "cpu")
# What ranks import in one test or another, and a rank imports in seconds: the ranks' server imports it once.
PRELOAD = (
    "tests.processes",
    "torch._dynamo",
    "torch.nn.attention.flex_attention",
    "transformers.models.llama.modeling_llama",
    "tests.rewrite.rewrite_ranks",
    "tests.rewrite.encoder_decoder_ranks",
    "tests.checkpoint.checkpoint_ranks",
)


# The files that take longest, from half a minute up on two cores. Of several at a time the last one ends alone.
LONGEST_FIRST = (
    "tests/flows/test_flows.py",
    "tests/rewrite/test_gradients.py",
    "tests/preflight/test_preflight.py",
    "tests/rewrite/test_encoder_decoder.py",
    "tests/step/users_numbers/test_counters.py",
    "tests/trainer/test_fit.py",
    "tests/checkpoint/test_resume.py",
    "tests/global_view/test_training.py",
    "tests/cli/test_commands.py",
    "tests/trainer/test_lightning.py",
    "tests/preflight/recording/test_read_numbers.py",
    # Of what is collected last the longest, so that both workers end together.
    "tests/trainer/pretrained/test_peft.py",
    "tests/trainer/compile/test_user_compile.py",
    "tests/trainer/whole_runs/test_lightning_options.py",
    "tests/trainer/batches/test_whole_batches.py",
    "tests/trainer/memory/test_float8.py",
    "tests/trainer/optimizers/test_optimizer_in_backward.py",
    "tests/trainer/processes/test_sigterm.py",
    "tests/trainer/memory/test_memory_options.py",
    "tests/trainer/whole_runs/test_users.py",
    "tests/trainer/pretrained/test_pretrained.py",
)


def pytest_configure(config):
    """Draw no constants of this project's own files, but with a profile of more cases: to find them takes each worker 20 s in a fresh clone."""
    if not config.getoption("--hypothesis-profile", None):
        assert providers.is_local_module_file is not None
        providers.is_local_module_file = lambda path: False


def pytest_collection_modifyitems(items):
    """Put the longest files first; `make test` hands them out in this order (`--no-loadscope-reorder`)."""
    place = {file: i for i, file in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def pytest_collection_finish():
    """Search what was imported no more when garbage is collected: it stays, and each fit ends with a collection."""
    gc.freeze()


@pytest.fixture(scope="session")
def pools():
    """Worlds by size, started on first use and shared by all distributed tests of the session, until a call in them fails."""
    started: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size in started and started[size].failure is not None:
            started.pop(size).close()
        if size not in started:
            started[size] = RankPool(size, timeout_s=TIMEOUT_S, preload=PRELOAD, device=DEVICE)
        return started[size]

    yield pool
    for each in started.values():
        each.stop()
    for each in started.values():
        each.close()


started_s = time.monotonic()
seconds: dict[str, float] = defaultdict(float)
num_tests: dict[str, int] = defaultdict(int)


def pytest_runtest_logreport(report):
    """Add what a test took, its fixtures included, to its folder's seconds."""
    folder = report.nodeid.partition("::")[0].removeprefix("tests/").partition("/")
    name = folder[0] if folder[1] else "(tests)"
    seconds[name] += report.duration
    num_tests[name] += report.when == "call"


def pytest_terminal_summary(terminalreporter):
    """Print where the time went, by folder; the rest is imports, collection and what runs between tests. And which nodes were not made."""
    skipped = [each for each in terminalreporter.stats.get("skipped", []) if each.nodeid.startswith("tests/cluster/")]
    for reason in sorted({each.longrepr[2] for each in skipped}):
        terminalreporter.section("tests/cluster did not run", sep="!")
        terminalreporter.write_line(reason)
    wall_s = time.monotonic() - started_s
    terminalreporter.section("seconds by folder")
    for name, folder_s in sorted(seconds.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{folder_s:7.1f}  {num_tests[name]:5}  {name}")
    if not terminalreporter.config.getoption("numprocesses", None):
        # Of several workers the seconds add up to more than the wall.
        terminalreporter.write_line(f"{wall_s - sum(seconds.values()):7.1f}         beside the tests")
    terminalreporter.write_line(f"{wall_s:7.1f}  {sum(num_tests.values()):5}  wall")
