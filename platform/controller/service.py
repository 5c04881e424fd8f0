"""The controller's process.

python -m lazytrain.platform.controller.service RAY_ADDRESS_OR_FILE
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import signal
import sys
import threading
import time
from pathlib import Path

from ...jobs.errors import InputError, Unreachable
from ...jobs.tracking import create_database
from ...schedulers.placement import Rules, decide
from ..admission import PlannerProcess
from ..artifacts import secret_file
from ..cluster.ray_runner import RayRunner
from ..cluster.runs import NodeReport
from ..inspection import versions
from ..logs import quiet_libraries
from ..settings import Settings
from ..store import Store
from .controller import Controller
from .ports import Config
from .rules import load_rules
from .step_times import StepTimes
from .telling import JOBS_THAT_ENDED, RUNS_THAT_DIED, Telling

log = logging.getLogger(__name__)

_EVERY_S = 0.5
_LONGEST_STEP_S = 120.0
_UNREACHABLE_STEPS = 6
AGAIN = 75
"""Exit code of a controller that has to begin anew: Ray keeps what it knows of a cluster for the whole process."""


def main(arguments: list[str]) -> int:
    """Lead, or wait to lead, until told to end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    quiet_libraries()
    settings = Settings.read()
    try:
        return _run(settings, arguments[0])
    except Unreachable as error:
        log.warning("%s", error)
        return AGAIN


def _run(settings: Settings, where: str) -> int:
    address = ray_address(where)
    store = Store(settings.database_url)
    runner = RayRunner(settings, address)
    told = _told_to_end()  # only now: Ray puts handlers of its own in place when it is connected
    planner = PlannerProcess(settings.log_dir / "planner.log")
    mlflow_uri = _mlflow(settings)
    token_file = settings.runs_dir / ".head"
    config = Config(
        rules=_rules(settings),
        search_batch=settings.batch_search,
        head=_head(token_file),
        token_file=token_file,
        start_timeout_s=settings.start_timeout_s,
        stop_timeout_s=settings.stop_timeout_s,
        mlflow_uri=mlflow_uri,
        tell_lost=Telling(RUNS_THAT_DIED),
        close_tracking=Telling(JOBS_THAT_ENDED, first=True) if mlflow_uri else Config.close_tracking,
    )
    name = f"{platform.node()}-{os.getpid()}-{secrets.token_hex(3)}"  # in containers the first two are the same
    controller = Controller(name, store, runner, planner, decide, config, time.time, time.monotonic)
    try:
        threading.Thread(target=_leave_with, args=(where, address), daemon=True).start()
        return _loop(controller, runner, address, told, StepTimes(settings.step_times_path))
    finally:
        controller.resign()
        planner.close()
        store.close()


def _told_to_end() -> threading.Event:
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: told.set())
    return told


def _leave_with(where: str, address: str) -> None:
    """End this process at once when another Ray has taken the place of ours: a call to one that is gone may hang."""
    while True:
        time.sleep(1.0)
        try:
            now = ray_address(where)
        except Unreachable:
            now = ""
        if now != address:
            log.warning("the Ray at %s is gone", address)
            os._exit(AGAIN)


def _loop(controller: Controller, runner: RayRunner, address: str, told: threading.Event, step_times: StepTimes) -> int:
    unreachable = 0
    while not told.wait(_EVERY_S):
        watchdog = threading.Timer(_LONGEST_STEP_S, os._exit, (AGAIN,))
        watchdog.daemon = True
        watchdog.start()
        started = time.perf_counter()
        if controller.step():
            step_times.add(time.perf_counter() - started)
        unreachable = 0 if _answers(runner) else unreachable + 1
        watchdog.cancel()
        if unreachable >= _UNREACHABLE_STEPS:
            log.warning("the Ray at %s is gone", address)
            return AGAIN
    return 0


def _answers(runner: RayRunner) -> bool:
    try:
        runner.machines()
    except Unreachable:
        return False
    return True


def ray_address(where: str) -> str:
    """The address itself, or the content of the file that holds it. Raises Unreachable when there is no such file."""
    if "/" not in where or where.startswith("ray://"):
        return where
    try:
        return Path(where).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise Unreachable(f"Ray has not written its address to {where} yet") from error


def _head(token_file: Path) -> NodeReport:
    """What nodes are compared with."""
    return NodeReport(versions=versions(), token=secret_file(token_file))


def _rules(settings: Settings) -> Rules:
    default = Config().rules
    return load_rules(settings.rules, default) if settings.rules is not None else default


def _mlflow(settings: Settings) -> str:
    """The MLflow store, made before anybody writes to it; empty without MLflow."""
    try:
        create_database(settings.tracking_uri, Config.experiment)
    except InputError as error:
        log.warning("without MLflow: %s", error)
        return ""
    except Exception as error:  # MLflow, SQL and HTTP each have their own; jobs go on, and tell it when it answers
        log.warning("MLflow takes no runs yet: %s", error)
    return settings.tracking_uri


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
