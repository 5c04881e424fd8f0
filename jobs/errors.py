"""Every error that lazytrain raises on purpose.

    LazytrainError              it ran and failed                      exit 1
    ├── InputError              a file or an option is wrong           exit 2
    │   ├── SpecError           the job file
    │   ├── DataError           the training or evaluation rows
    │   ├── ModelError          the model or its tokenizer
    │   └── HardwareError       a GPU, profile or node nobody knows
    │       └── DeviceBusy      a GPU that something else uses
    ├── DoesNotFit              no plan fits the budgets               exit 3
    ├── OutOfTime               no plan was found in the time allowed
    ├── OutOfMemory             a tier's budget was passed while running
    ├── StorageError            a tier's disk failed while running
    ├── StepFailed              work that one stream of a step was given raised something
    ├── ProgramError            the model did not do what the step program says
    │   └── InvariantBroken     an operation could overtake another (found by debug mode)
    ├── NonFiniteGradient       training diverged
    ├── CheckpointError         a checkpoint is incomplete, damaged or of another run
    └── ServiceError            the shared service refused a request or cannot be reached
        ├── NotFound            no such job, node or user, or none that this user may see
        ├── Conflict            it is not possible in the state that the thing is in
        ├── Forbidden           the user's role does not allow it
        ├── Unauthorized        no token, or one that nobody knows
        ├── TooMany             more requests, or larger ones, than one user may send
        └── Unreachable         the service does not answer

The person who reads the message can act on it: it says what failed, why, and, in ``hint``, what to change.
All of them survive pickling with their fields, because they cross process borders.
"""

from __future__ import annotations

from typing import Any, ClassVar


class LazytrainError(Exception):
    """Base of all errors; ``code`` is for programs, ``message`` and ``hint`` for people."""

    code: ClassVar[str] = "failed"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.__dict__.copy()))

    def to_dict(self) -> dict[str, str]:
        """The error as the JSON that the command line and the REST API print."""
        return {"code": self.code, "message": self.message, "hint": self.hint, "field": getattr(self, "field", "")}


def _rebuild(kind: type[LazytrainError], fields: dict[str, Any]) -> LazytrainError:
    error = kind.__new__(kind)
    error.__dict__.update(fields)
    error.args = (fields["message"],)
    return error


def error_of(code: str, message: str, hint: str = "", field: str = "") -> LazytrainError:
    """The error that another process described by `LazytrainError.to_dict`, as the class that has this code."""
    kinds = {kind.code: kind for kind in _family(LazytrainError)}
    return _rebuild(kinds.get(code, LazytrainError), {"message": message, "hint": hint, "field": field})


def _family(kind: type[LazytrainError]) -> list[type[LazytrainError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _family(child))]


class InputError(LazytrainError):
    """A file or an option that does not validate."""

    code = "invalid_input"
    exit_code = 2


class SpecError(InputError):
    """The job file is wrong at ``field`` (dotted path), ``line`` (from 1; 0 when unknown)."""

    code = "invalid_spec"

    def __init__(self, message: str, *, field: str = "", line: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.field = field
        self.line = line


class DataError(InputError):
    """The rows cannot be read, or none of them is usable."""

    code = "invalid_data"


class ModelError(InputError):
    """The model, its configuration or its tokenizer cannot be used."""

    code = "invalid_model"


class HardwareError(InputError):
    """A GPU, a profile or a device nobody knows."""

    code = "unknown_hardware"


class DeviceBusy(HardwareError):
    """The GPU that a job was given is in use by something else: nothing is wrong with the job."""

    code = "gpu_busy"


class DoesNotFit(LazytrainError):
    """No plan fits; ``reasons`` holds one mapping per resource that is short (see ``interfaces``: ``plan --json``)."""

    code = "does_not_fit"
    exit_code = 3

    def __init__(self, message: str, *, reasons: tuple[dict[str, Any], ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reasons = reasons


class OutOfTime(LazytrainError):
    """No plan was found in the time allowed; whether one fits is not known."""

    code = "out_of_time"


class OutOfMemory(LazytrainError):
    """A tier (``gpu``, ``host`` or ``nvme``) has no room for ``requested_bytes`` more."""

    code = "out_of_memory"

    def __init__(self, *, tier: str, requested_bytes: int, used_bytes: int, budget_bytes: int, hint: str = "") -> None:
        super().__init__(
            f"out of memory on {tier}: {requested_bytes:,} bytes more wanted, {used_bytes:,} of {budget_bytes:,} used",
            hint=hint or f"use a smaller batch or sequence length, or give the {tier} tier more room",
        )
        self.tier = tier
        self.requested_bytes = requested_bytes
        self.used_bytes = used_bytes
        self.budget_bytes = budget_bytes


class StorageError(LazytrainError):
    """The disk of a tier (``nvme``) failed to move ``nbytes``."""

    code = "storage_failed"

    def __init__(self, message: str, *, tier: str = "nvme", nbytes: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.tier = tier
        self.nbytes = nbytes


class StepFailed(LazytrainError):
    """Operation ``op`` of a step raised, on ``stream``, what nobody foresaw."""

    code = "step_failed"

    def __init__(self, message: str, *, op: str, stream: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.op = op
        self.stream = stream


class ProgramError(LazytrainError):
    """The model called its layers otherwise than the step program says."""

    code = "program_mismatch"


class InvariantBroken(ProgramError):
    """Operation ``op`` breaks ``invariant``, one of ``jobs.policy.hazards.INVARIANTS``: an error of this package."""

    code = "invariant_broken"

    def __init__(self, invariant: str, op: str, why: str) -> None:
        super().__init__(f"{invariant}: {op}: {why}", hint="please report this, with the policy file")
        self.invariant = invariant
        self.op = op


class NonFiniteGradient(LazytrainError):
    """Too many steps in a row had a gradient that is not finite."""

    code = "non_finite"


class CheckpointError(LazytrainError):
    """A checkpoint is incomplete, damaged, or belongs to another run."""

    code = "invalid_checkpoint"


class ServiceError(LazytrainError):
    """The shared service refused a request or cannot be reached."""

    code = "service"


class NotFound(ServiceError):
    """There is no such job, node or user, or none that this user may see."""

    code = "not_found"
    exit_code = 2


class Conflict(ServiceError):
    """It is not possible in the state that the thing is in, or somebody else was faster."""

    code = "conflict"


class Forbidden(ServiceError):
    """The user's role does not allow it."""

    code = "forbidden"


class Unauthorized(ServiceError):
    """No token, or one that nobody knows."""

    code = "unauthorized"


class TooMany(ServiceError):
    """More requests, or larger ones, than one user may send."""

    code = "too_many"


class Unreachable(ServiceError):
    """The service does not answer."""

    code = "unreachable"
