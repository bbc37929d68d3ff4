"""Ranks of one host listen on its loopback alone, unless the user names an interface."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from lightning_sp.comm.fresh_store import joined_store
from lightning_sp.comm.loopback import LoopbackOfRun, listening_on_loopback
from lightning_sp.testing import free_port
from tests.comm.loopback_run import listening

ROOT = Path(__file__).parents[2]
NAME = "GLOO_SOCKET_IFNAME"


def test_the_store_of_a_host_listens_on_its_loopback():
    at, limit = ("127.0.0.1", free_port()), timedelta(seconds=20)
    store = joined_store(0, 1, limit, at=at, run="")
    assert {address for address, port in listening() if port == at[1]} == {"127.0.0.1"}
    # A second run of the process finds the store that is there.
    joined_store(0, 1, limit, at=at, run="").set("name", "value")
    assert {address for address, port in listening() if port == at[1]} == {"127.0.0.1"}
    del store


def test_an_address_of_a_network_and_a_port_that_is_taken_are_torchs():
    assert listening_on_loopback("192.0.2.1", free_port()) is None
    assert listening_on_loopback("no.such.host.invalid", free_port()) is None
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert listening_on_loopback("127.0.0.1", other.getsockname()[1]) is None


def test_a_variable_of_the_user_stays_and_ours_goes(monkeypatch):
    of_run = LoopbackOfRun()
    monkeypatch.setenv(NAME, "eth7")
    of_run.start()
    of_run.stop()
    assert os.environ[NAME] == "eth7"
    monkeypatch.delenv(NAME)
    of_run.start()
    assert os.environ[NAME] in ("lo", "lo0")
    of_run.stop()
    assert NAME not in os.environ


@pytest.mark.slow
def test_a_run_of_one_host_listens_nowhere_else():
    environment = {
        name: value for name, value in os.environ.items() if name not in (NAME, "MASTER_ADDR", "MASTER_PORT")
    }
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.comm.loopback_run"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    told = [line for line in run.stdout.splitlines() if line.startswith("rank ")]
    assert sorted(told) == ["rank 0 listens at 127.0.0.1", "rank 1 listens at 127.0.0.1"], run.stdout
