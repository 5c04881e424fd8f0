"""Ray's errors as ours: what a person reads is what went wrong in the worker, not where Ray noticed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray.exceptions
from ray.train import ControllerError, WorkerGroupError

from ...jobs.errors import LazytrainError

_DIED = (
    "the training process died without an error of its own",
    "it was killed from outside, most often because the host ran out of memory: lazytrain doctor shows the limit",
)


def translate(error: BaseException, traces: Path | None = None) -> LazytrainError:
    """The LazytrainError that ``error`` carries or amounts to; ``traces`` is where the worker wrote what it raised."""
    ours = _ours(_unwrap(error))
    if traces is not None and not ours.hint and traces.is_dir():
        ours.hint = f"the full trace is in {traces}"
    if ours is not error:
        ours.__cause__ = error
    return ours


def _unwrap(error: BaseException) -> BaseException:
    """The innermost error that says something."""
    if isinstance(error, WorkerGroupError) and error.worker_failures:
        return _unwrap(next(iter(error.worker_failures.values())))
    if isinstance(error, ControllerError):
        return _unwrap(error.controller_failure)
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, BaseException):
        return _unwrap(error.cause)
    return error


def _ours(error: BaseException) -> LazytrainError:
    if isinstance(error, LazytrainError):
        return error
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return LazytrainError(
            f"Ray's memory monitor ended the process because the host was almost full: {_first_line(error)}",
            hint="lower plan.host_memory, or raise LAZYTRAIN_RAY_MEMORY_THRESHOLD",
        )
    if _is_death(error):
        return LazytrainError(_DIED[0], hint=_DIED[1])
    return LazytrainError(f"the training process failed: {type(error).__name__}: {_first_line(error)}")


def _is_death(error: Any) -> bool:
    deaths = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError)
    # Train wraps a failed health check in an error that it does not export.
    return isinstance(error, deaths) or type(error).__name__ == "WorkerHealthCheckFailedError"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
