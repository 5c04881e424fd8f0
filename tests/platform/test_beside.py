"""Two things at once, in a process that has no other threads: that of the tests may have some."""

import subprocess
import sys

import pytest

from lazytrain.jobs.errors import ModelError
from lazytrain.platform import beside as module

SCRIPT = """
import os, signal
from lazytrain.jobs.errors import ModelError
from lazytrain.platform.beside import beside, may_fork

assert may_fork()
me, done = os.getpid(), []

def work():
    return f"{os.getpid()} {done}"

found = beside(work, lambda: done.append("here"), first=lambda: done.append("first"))
assert found.endswith(" ['first']") and not found.startswith(str(me)) and done == ["here"], (found, done)

def refuse():
    raise ModelError("no such model", hint="another one")

try:
    beside(refuse, int, first=int)
except ModelError as error:
    assert error.hint == "another one"
else:
    raise AssertionError

def die():
    if os.getpid() != me:
        os.kill(os.getpid(), signal.SIGKILL)
    return "done here"

assert beside(die, int, first=int) == "done here"
assert beside(lambda: "not there" if os.getpid() == me else 1 / 0, int, first=int) == "not there"

def want():
    if os.getpid() == me:
        return "found here"
    try:
        import no_such_module
    except ImportError as error:
        raise ModelError("it wants a module") from error

assert beside(want, int, first=int) == "found here"

def fail():
    raise KeyboardInterrupt

try:
    beside(lambda: signal.pause(), fail, first=int)
except KeyboardInterrupt:
    pass
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("nobody is left")
"""


def test_what_is_done_in_a_process_beside_this_one() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "nobody is left\n"), ended.stderr


def test_where_no_process_can_be_forked_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "may_fork", lambda: False)
    done: list[str] = []
    assert module.beside(lambda: str(done), lambda: done.append("here"), first=lambda: done.append("first")) == "[]"

    def refuse() -> str:
        raise ModelError("no such model")

    with pytest.raises(ModelError, match="no such model"):
        module.beside(refuse, int, first=int)
