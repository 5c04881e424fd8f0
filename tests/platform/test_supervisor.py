"""Keeping processes running, with stand-ins for the service's own."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lazytrain.platform import supervisor
from lazytrain.platform.artifacts import write_json
from lazytrain.platform.supervisor import Place, Process

SLEEPER = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"]
STUBBORN = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]


def wait_for(what: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for file in (tmp_path / "run").glob("*.pid"):
        process = Place(tmp_path).process(file.stem)
        if process is not None:
            os.kill(process.pid, signal.SIGKILL)


def begin(home: Path, **services: list[str]) -> "subprocess.Popen[bytes]":
    write_json(Place(home).services, services)
    started = subprocess.Popen([sys.executable, "-m", "lazytrain.platform.supervisor", str(home)])
    me = Process.of(started.pid)
    wait_for(lambda: Place(home).process(supervisor.NAME) == me)
    wait_for(lambda: all(Place(home).process(name) for name in services))
    return started


def test_what_dies_is_started_again_and_all_stops_together(home: Path) -> None:
    started = begin(home, one=SLEEPER, two=SLEEPER)
    place = Place(home)
    one, two = place.process("one"), place.process("two")
    assert one is not None
    assert two is not None
    wait_for(lambda: (home / "logs" / "one.log").read_text() == "here\n")
    os.kill(one.pid, signal.SIGKILL)
    wait_for(lambda: place.process("one") not in (None, one))
    assert place.process("two") == two
    assert supervisor.stop(home) == ["supervisor", "two", "one"]
    assert started.wait(20) == 0
    assert place.process("one") is None
    assert not two.alive
    assert supervisor.stop(home) == []


def test_a_killed_supervisor_is_followed_by_one_that_takes_over(home: Path) -> None:
    first = begin(home, one=SLEEPER)
    place = Place(home)
    one = place.process("one")
    first.kill()
    first.wait(20)
    second = begin(home, one=SLEEPER)
    assert place.process("one") == one
    assert supervisor.stop(home) == ["supervisor", "one"]
    second.wait(20)
    assert one is not None
    assert not one.alive


def test_there_is_one_supervisor(home: Path) -> None:
    first = begin(home, one=SLEEPER)
    second = subprocess.run(
        [sys.executable, "-m", "lazytrain.platform.supervisor", str(home)], capture_output=True, text=True, timeout=30
    )
    assert second.returncode != 0
    assert "is running already" in second.stderr
    supervisor.stop(home)
    first.wait(20)


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = supervisor.start(STUBBORN, log)
    process.end(patience_s=0.2)
    os.waitpid(process.pid, 0)
    assert not process.alive


def test_a_number_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.note("one", Process(os.getpid(), "1"))
    assert place.process("one") is None
    me = Process.of(os.getpid())
    assert me is not None
    place.note("one", me)
    assert place.process("one") == me


def test_a_full_disk_does_not_end_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Process] = []

    def note(place: Place, name: str, process: Process) -> None:
        started.append(process)
        if len(started) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Place, "note", note)
    kept, place = supervisor._Kept("one", SLEEPER), Place(tmp_path)
    (tmp_path / "logs").touch()  # no room for the log
    kept.look(place, 0.0)
    assert (kept.process, started) == (None, [])
    kept.look(place, 0.1)
    (tmp_path / "logs").unlink()
    kept.look(place, 1.0)
    assert kept.process is not None
    try:
        kept.look(place, 2.0)
        assert started == [kept.process]  # it runs, though nobody could write down that it does
    finally:
        os.kill(kept.process.pid, signal.SIGKILL)
        os.waitpid(kept.process.pid, 0)
