"""Planning in another process: answers, errors as the ones they were, and a process that dies."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.errors import DataError, LazytrainError
from lazytrain.platform.admission import Admission, AdmissionOrder
from lazytrain.platform.admission.planner import PlannerProcess

CHILD = """
import json, os, sys, time
for line in sys.stdin:
    job = json.loads(line)["job"]
    if job == "dies" or (job == "dies once" and not os.path.exists("died")):
        open("died", "w").close()
        os._exit(9)
    if job == "hangs":
        while not os.path.exists("go on"):
            time.sleep(0.01)
    if job == "bad":
        answer = {"error": {"code": "invalid_data", "message": "no usable row", "hint": "look", "field": ""}}
    else:
        answer = {"admission": {"batch": 8, "steps": 5, "ways": {}, "limits": {}}}
    print(json.dumps({"job": job, **answer}), flush=True)
"""


@pytest.fixture
def planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlannerProcess]:
    (tmp_path / "stand_in.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    made = PlannerProcess(tmp_path / "logs" / "planner.log", module="stand_in")
    yield made
    made.close()


def order(job: str, priority: int = 50, user: str = "") -> AdmissionOrder:
    return AdmissionOrder(job=job, spec={}, profiles={}, cache="", priority=priority, user=user)


def gather(planner: PlannerProcess, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    wait_for(lambda: len(found.update(planner.results()) or found) >= count)  # type: ignore[func-returns-value]
    return found


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_answers_and_errors(planner: PlannerProcess) -> None:
    assert planner.results() == {}
    for job in ("good", "bad", "good"):
        planner.submit(order(job))
    found = gather(planner, 2)
    assert isinstance(found["good"], Admission)
    assert isinstance(found["bad"], DataError)
    assert (found["bad"].message, found["bad"].hint) == ("no usable row", "look")
    assert planner.results() == {}
    planner.submit(order("good"))  # once answered, it may be asked again
    assert set(gather(planner, 1)) == {"good"}


def test_an_urgent_job_does_not_wait_for_all_that_came_before_it(planner: PlannerProcess) -> None:
    for job in ("a", "b", "c", "d", "e"):
        planner.submit(order(job))
    planner.submit(order("urgent", 90))
    planner.submit(order("e", 80))  # its priority was raised meanwhile
    answered: list[str] = []
    wait_for(lambda: len(answered.extend(planner.results()) or answered) == 6)  # type: ignore[func-returns-value]
    assert answered == ["a", "b", "urgent", "e", "c", "d"]


def test_whoever_submits_thousands_keeps_nobody_else_waiting(planner: PlannerProcess) -> None:
    many = [f"a{number}" for number in range(6)]
    for job in many:
        planner.submit(order(job, user="ada"))
    for job in ("b0", "b1"):
        planner.submit(order(job, user="ben"))
    answered: list[str] = []
    wait_for(lambda: len(answered.extend(planner.results()) or answered) == 8)  # type: ignore[func-returns-value]
    assert answered.index("b1") < answered.index("a4")


def test_an_order_that_kills_the_process_is_given_up_and_the_others_are_planned(planner: PlannerProcess) -> None:
    for job in ("first", "dies", "later"):
        planner.submit(order(job))
    found = gather(planner, 3)
    assert isinstance(found["dies"], LazytrainError)
    assert "died" in found["dies"].message
    assert isinstance(found["first"], Admission)
    assert isinstance(found["later"], Admission)


def test_a_process_that_was_killed_once_is_nobodys_fault(planner: PlannerProcess) -> None:
    """The kernel ends a process when another one takes the memory."""
    for job in ("dies once", "later"):
        planner.submit(order(job))
    found = gather(planner, 2)
    assert isinstance(found["dies once"], Admission)
    assert isinstance(found["later"], Admission)


def test_a_slow_job_keeps_no_other_waiting(planner: PlannerProcess, tmp_path: Path) -> None:
    now = 0.0
    planner._clock = lambda: now
    for job in ("hangs", "behind", "third"):
        planner.submit(order(job))
    assert planner.results() == {}
    now = 61.0
    assert gather(planner, 2).keys() == {"behind", "third"}
    assert len(planner._workers) == 2
    (tmp_path / "go on").touch()
    assert gather(planner, 1).keys() == {"hangs"}
    planner.submit(order("again"))
    assert gather(planner, 1).keys() == {"again"}
    planner.results()
    assert len(planner._workers) == 1  # one is enough again


def test_a_large_order_does_not_wait_for_a_process_that_is_busy(planner: PlannerProcess, tmp_path: Path) -> None:
    """A pipe holds 64 KiB, and the controller has other things to do."""
    large = AdmissionOrder(job="large", spec={"x": "y" * (1 << 20)}, profiles={}, cache="")
    planner.submit(order("hangs"))
    planner.submit(large)  # it hangs until the file is there
    (tmp_path / "go on").touch()
    assert gather(planner, 2).keys() == {"hangs", "large"}


def test_a_planner_that_cannot_be_started_is_tried_again(planner: PlannerProcess, tmp_path: Path) -> None:
    (tmp_path / "logs").touch()  # no folder for its log
    planner.submit(order("good"))
    assert planner.results() == {}
    (tmp_path / "logs").unlink()
    assert gather(planner, 1).keys() == {"good"}


def test_the_process_does_not_outlive_the_controller(planner: PlannerProcess) -> None:
    planner.submit(order("good"))
    gather(planner, 1)
    process = planner._workers[0].process
    assert process.stdin is not None
    process.stdin.close()  # which the kernel does when we die
    assert process.wait(20) == 0
    assert sys.executable in process.args  # type: ignore[operator]
