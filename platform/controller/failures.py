"""Why an attempt failed, and what that means for the job: a pure function, so that the whole table can be tested."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from ...jobs.errors import DeviceBusy
from ..cluster.runs import HOST_LOST, Outcome

_GPU_FAULT = re.compile(
    r"uncorrectable ECC|\bXid\b|illegal memory access|unspecified launch failure|device-side assert"
    r"|GPU has fallen off the bus|CUDA error: (?!out of memory)|NVML.*(lost|unknown)",
    re.IGNORECASE,
)
_OUT_OF_MEMORY = re.compile(r"out of memory", re.IGNORECASE)
_DISK_FULL = re.compile(r"disk full|no space left on device|disk quota exceeded", re.IGNORECASE)
_FIRST_PAUSE_S, _BUSY_PAUSE_S = 10.0, 30.0
LONGEST_PAUSE_S = 600.0
_BAD_GPU_AFTER = 3
KILL, TERMINATE, ABORT = 9, 15, 6


class Failure(str, Enum):
    """Classes of failures; each is treated in one way."""

    OUT_OF_MEMORY = "out_of_memory"
    """A tier overflowed: planned again with less, once."""
    GPU_FAULT = "gpu_fault"
    """The device broke: started again on another node."""
    USER_ERROR = "user_error"
    """The same would happen again: not started again."""
    NODE_LOST = "node_lost"
    """The machine or the run vanished: goes on elsewhere from its last checkpoint."""
    KILLED = "killed"
    """Something killed the process: goes on after a pause."""
    GPU_BUSY = "gpu_busy"
    """Something outside uses the GPU: waits, and no retry is used up."""
    DISK_FULL = "disk_full"
    """Somebody has to free some space: waits, and no retry is used up."""
    UNKNOWN = "unknown"
    """Anything else: goes on after a pause that doubles each time."""


@dataclass(frozen=True)
class Tally:
    """What a job has been through, and how much it may."""

    infra_failures: int
    user_failures: int
    replans: int
    retries: int


@dataclass(frozen=True)
class Verdict:
    """What to do about a failure."""

    failure: Failure
    again: bool
    pause_s: float = 0.0
    other_node: bool = False
    """The node is not used for this job again, and the fault is counted against it."""
    replan: bool = False
    infra: bool = False
    """Which of the two counters it raises."""
    counts: bool = True
    """Whether it raises one at all."""


def disk_is_full(message: str) -> bool:
    """Whether an error says that there is no room on a disk, which is no fault of the job."""
    return _DISK_FULL.search(message) is not None


def classify(outcome: Outcome) -> Failure:
    """The class of an attempt that did not end well. A lost run has no outcome and is NODE_LOST."""
    text = f"{outcome.message} {outcome.hint}"
    if outcome.code == DeviceBusy.code:
        return Failure.GPU_BUSY
    if outcome.code == HOST_LOST:
        return Failure.NODE_LOST
    if _GPU_FAULT.search(text):
        return Failure.GPU_FAULT
    if outcome.code == "out_of_memory" or _OUT_OF_MEMORY.search(outcome.message):
        return Failure.OUT_OF_MEMORY
    if disk_is_full(outcome.message):
        return Failure.DISK_FULL
    if outcome.final:
        return Failure.USER_ERROR
    if outcome.signal in (KILL, TERMINATE):
        return Failure.KILLED
    return Failure.UNKNOWN


def judge(failure: Failure, tally: Tally) -> Verdict:
    """Whether the job is started again after this failure, when, and how otherwise."""
    if failure is Failure.USER_ERROR:
        return Verdict(failure, again=False)
    if failure is Failure.GPU_BUSY:
        return Verdict(failure, again=True, pause_s=_BUSY_PAUSE_S, counts=False)
    if failure is Failure.DISK_FULL:
        return Verdict(failure, again=True, pause_s=LONGEST_PAUSE_S, counts=False)
    if failure is Failure.OUT_OF_MEMORY:
        return Verdict(failure, again=tally.replans == 0, replan=True)
    if failure in (Failure.NODE_LOST, Failure.GPU_FAULT):
        again = tally.infra_failures < tally.retries
        return Verdict(failure, again, other_node=failure is Failure.GPU_FAULT, infra=True)
    infra = failure is Failure.KILLED
    before = tally.infra_failures if infra else tally.user_failures
    pause_s = min(_FIRST_PAUSE_S * 2**before, LONGEST_PAUSE_S)
    return Verdict(failure, before < tally.retries, pause_s, infra=infra)


def bad_after(faults: int) -> bool:
    """Whether a node with so many faults is taken out of service."""
    return faults >= _BAD_GPU_AFTER
