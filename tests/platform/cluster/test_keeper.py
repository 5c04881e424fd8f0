"""A command under the keeper leaves nothing behind, however it ends. Real processes, all of them our own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lazytrain.platform.cluster import keeper

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
loader = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(os.getpid(), loader.pid, flush=True)
if sys.argv[1] == "leave":
    sys.exit(7)
if sys.argv[1] == "eat":
    eaten = bytearray(os.urandom(1 << 20)) * 300
time.sleep(600)
"""


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(how: str, host_bytes: int = 0) -> tuple["subprocess.Popen[str]", list[psutil.Process]]:
        command = [sys.executable, "-c", STUBBORN, how]
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__, str(tmp_path / "exit.json"), str(host_bytes), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        return process, [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]

    yield start
    for process in started:
        with process:
            process.kill()


def test_the_exit_code_and_no_child_left(kept: Any, tmp_path: Path) -> None:
    process, children = kept("leave")
    assert process.wait(20) == 7
    assert psutil.wait_procs(children, timeout=0)[1] == []
    ended = json.loads((tmp_path / "exit.json").read_text())
    assert (ended["exit_code"], ended["signal"], ended["because"]) == (7, None, "")


@pytest.mark.parametrize("how", ["asked", "host_lost"])
def test_a_command_that_ignores_sigterm_and_its_loader_in_another_session(kept: Any, tmp_path: Path, how: str) -> None:
    """Case U91: stop, and kill -9 of the parent (its end of the pipe is closed by the kernel then)."""
    process, children = kept("stay")
    assert len(children) == 2
    if how == "asked":
        process.send_signal(signal.SIGTERM)
    else:
        process.stdin.close()
    assert process.wait(20) == 128 + signal.SIGKILL
    assert psutil.wait_procs(children, timeout=0)[1] == []
    assert json.loads((tmp_path / "exit.json").read_text())["because"] == how


def test_a_memory_limit(kept: Any, tmp_path: Path) -> None:
    process, children = kept("eat", host_bytes=200 << 20)
    assert process.wait(30) == 128 + signal.SIGKILL
    ended = json.loads((tmp_path / "exit.json").read_text())
    assert ended["because"] == "host_memory"
    assert ended["peak_host_bytes"] > 200 << 20
    assert psutil.wait_procs(children, timeout=0)[1] == []


def test_when_the_keeper_itself_is_killed_its_command_ends(kept: Any) -> None:
    process, children = kept("stay")
    main = children[0]
    process.kill()
    process.wait(10)
    assert psutil.wait_procs([main], timeout=10)[1] == []
    for child in children[1:]:  # nobody is left who could know of it
        os.kill(child.pid, signal.SIGKILL)


def test_a_disk_that_is_full_for_a_while_does_not_cost_the_word_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(keeper.time, "sleep", lambda seconds: (waited.append(seconds), (tmp_path / "there").mkdir()))
    keeper._write_in_time(tmp_path / "there" / "exit.json", {"exit_code": 0})
    assert json.loads((tmp_path / "there" / "exit.json").read_text()) == {"exit_code": 0}
    assert waited == [1.0]
