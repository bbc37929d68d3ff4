"""tools/bootstrap.py: which torch a machine gets, and that it says so. No package is installed here."""

import http.server
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tools import bootstrap

ROOT = Path(__file__).parents[2]


class _Index(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(200 if self.path == "/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def index(monkeypatch):
    """An index of CPU builds on this machine."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Index) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def cpu_machine(monkeypatch):
    monkeypatch.setattr(bootstrap.platform, "system", lambda: "Linux")
    monkeypatch.setattr(bootstrap, "has_nvidia_driver", lambda: False)


@pytest.mark.usefixtures("cpu_machine")
def test_a_machine_without_a_driver_asks_the_cpu_index_when_it_answers(index):
    source = bootstrap.choose_torch_source(None, "2.13.0", cpu_index=f"{index}/cpu")
    assert source.pip_arguments == ["--extra-index-url", f"{index}/cpu"]
    source = bootstrap.choose_torch_source(None, "2.13.0", cpu_index=f"{index}/missing")
    assert source.pip_arguments == []
    assert "gave no answer within 3 s" in source.reason
    assert "CUDA build, several GB" in source.reason


def test_a_machine_with_a_driver_and_one_with_torch_ask_nobody(monkeypatch):
    monkeypatch.setattr(bootstrap.platform, "system", lambda: "Linux")
    monkeypatch.setattr(bootstrap, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(bootstrap, "answers", lambda url: pytest.fail(f"asked {url}"))
    assert "CUDA build" in bootstrap.choose_torch_source(None, "2.13.0").reason
    monkeypatch.setattr(bootstrap, "has_nvidia_driver", lambda: False)
    assert "installed already" in bootstrap.choose_torch_source("2.13.0+cpu", "2.13.0").reason


@pytest.mark.usefixtures("cpu_machine")
def test_another_version_than_the_pinned_one_is_looked_for_again(index):
    source = bootstrap.choose_torch_source("2.11.0+cpu", "2.13.0", cpu_index=f"{index}/cpu")
    assert source.pip_arguments


def test_a_server_that_accepts_and_stays_silent_is_given_up_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start_s = time.monotonic()
        assert not bootstrap.answers(f"http://127.0.0.1:{silent.getsockname()[1]}/torch/", timeout_s=0.3)
        assert time.monotonic() - start_s < 2


def test_the_constraints_pin_torch():
    assert bootstrap.pinned_version(ROOT / "constraints.txt", "torch") == "2.13.0"
    assert bootstrap.pinned_version(ROOT / "constraints.txt", "tor") is None


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(bootstrap.BootstrapError, match="is no virtual environment: move it away"):
        bootstrap.make_venv(tmp_path, same_python=True)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.slow
def test_an_environment_whose_interpreter_is_gone_is_replaced(tmp_path, capfd):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text("home = /gone\n")
    (venv / "bin" / "python").symlink_to("/gone/python")
    bootstrap.make_venv(venv, same_python=False)
    assert "its interpreter is gone" in capfd.readouterr().out
    assert bootstrap.output_of([bootstrap.python_in(venv), "-c", "print(1)"]) == "1"


def test_pip_that_fails_shows_its_last_lines_and_its_log(tmp_path):
    log = tmp_path / "log"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(bootstrap.BootstrapError, match=r"no such option: --nonsense[\s\S]*its whole output: ") as error:
        bootstrap.pip_install(tmp_path, ["--nonsense"], log=log)
    assert str(log) in str(error.value)
    assert "no such option" in log.read_text()


def test_make_refuses_an_interpreter_that_is_too_old_or_absent(tmp_path):
    command = ["make", f"VENV={tmp_path / 'venv'}", f"PYTHON={tmp_path / 'python3.8'}", f"{tmp_path / 'venv'}/.stamp"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode != 0
    assert f"needs Python 3.10 or newer with the modules venv and ensurepip; tried: {tmp_path / 'python3.8'}." in (
        result.stderr
    )
