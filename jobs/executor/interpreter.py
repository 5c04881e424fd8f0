"""Interprets a step program: who runs when, on which stream, after what.

Compute operations are driven from outside, by the model. Before each, everything that stands before it in the program
is handed to its stream, and the compute thread waits for what the operation needs; after it, what follows is handed
over at once, up to the next compute operation or to the first that takes memory of the device: until the model has gone
on, its own frames, or autograd's, still hold what the operation was given.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ..errors import ProgramError
from ..policy import UPDATE_PHASE, Op, Program
from ..policy.program import Kind
from . import failures
from .checks import NoChecks
from .devices import Device, Event
from .transfers import Transfers, Work


class Interpreter:
    """The place in one program at a time, and the events of the operations before it."""

    def __init__(
        self,
        program: Program,
        names: Sequence[str],
        device: Device,
        transfers: Transfers,
        recompute: Callable[[Op], None],
        checks: NoChecks,
    ) -> None:
        """``names`` are the units', for messages; ``recompute`` does the compute that the model does not drive."""
        self._names, self._device, self._transfers, self._run_recompute = names, device, transfers, recompute
        self._checks = checks
        self.stall_s: dict[str, float] = defaultdict(float)
        self.moved_bytes: Counter[str] = Counter()
        self.reset(program)

    def reset(self, program: Program) -> None:
        """Be at the end of ``program``, nothing having run."""
        self.program, self._next = program, len(program.ops)
        self._taking = {buffer.acquired_by for buffer in program.buffers if buffer.tier == "gpu"}
        self._events: dict[str, Event] = {}

    def begin(self, program: Program, updates: Mapping[str, Event]) -> None:
        """Start a program; ``updates`` are the events of its first operations, which the step before has started."""
        self.reset(program)
        for self._next, op in enumerate(program.ops):
            if op.kind not in UPDATE_PHASE:
                break
            self._events[op.id] = updates.get(op.id, Event.ended())
        self._checks.begin(program, self._events)

    # ---- where it is

    @property
    def at_end(self) -> bool:
        """Whether every operation was handed over."""
        return self._next == len(self.program.ops)

    def upcoming(self) -> Op | None:
        """The next compute operation that the model drives, if the program has one."""
        position = self.program.driven[self._next]
        return self.program.ops[position] if position >= 0 else None

    def peek(self, kind: str, unit: int) -> Op:
        """The next compute operation that the model drives; raise ProgramError if it is not the one named."""
        expected = self.upcoming()
        if expected is None or (expected.kind, expected.unit) != (kind, unit):
            wanted = expected.id if expected else "the step to end with step()"
            raise ProgramError(
                f"the model runs {kind} of {self._names[unit]} where the program has {wanted}",
                hint="run forward, backward, step in turn, and evaluate under torch.no_grad() between steps",
            )
        return expected

    # ---- going on

    def advance(self, kind: str, unit: int) -> Op:
        """Hand over everything before the operation named, and make compute wait for what it needs."""
        target = self.peek(kind, unit)
        while (op := self.program.ops[self._next]) is not target:
            if op.kind == "recompute":
                self._await(op)
                self._run_recompute(op)
                self.finish(op)
            else:
                self._issue(op)
        self._await(op)
        return op

    def finish(self, op: Op) -> None:
        """A compute operation has ended: hand over what follows it and needs no room on the device."""
        self._checks.finished(op)
        self._events[op.id] = self._device.compute_event()
        self._device.compute_ended(op.id, self._started)
        self._next += 1
        while not self.at_end:
            following = self.program.ops[self._next]
            if following.stream == "compute" or following.id in self._taking:
                break
            if following.kind in ("offload", "spill"):
                break  # the boundary that they take comes with the next tick
            self._issue(following)

    def run_out(self) -> None:
        """Hand over what is left, when that is nothing that the model drives."""
        while not self.at_end:
            self._issue(self.program.ops[self._next])

    def submit(self, op: Op, work: Work, nbytes: int, after: Sequence[Event]) -> Event:
        """Hand work over to the operation's stream."""

        def named() -> None:
            try:
                work()
            except Exception as error:  # whatever it is, who waits for it is told which operation failed
                raise failures.in_stream(op, error) from error

        self.moved_bytes[op.stream] += nbytes
        return self._device.streams[op.stream].submit(op.id, named, after, nbytes)

    def _await(self, op: Op) -> None:
        for name in op.after:
            before = time.perf_counter()
            self._device.compute_waits(self._events[name])
            self.stall_s[self.program.ops[self.program.index[name]].stream] += time.perf_counter() - before
        self._checks.starting(op)
        self._started = self._device.compute_started()

    def _issue(self, op: Op) -> None:
        work, nbytes = self._checks.prepare(op, self._transfers)
        after = [self._events[name] for name in op.after]
        if op.stream == "h2d" or op.kind == "fetch":
            after.append(self._device.compute_event())  # the memory it fills may only just have been given up
        self._events[op.id] = self.submit(op, work, nbytes, after)
        self._next += 1

    # ---- the end

    def wait_for(self, name: str) -> None:
        """Return when the operation has ended; raise what it, or any other of the program, raised.

        Who waits for the last of a stream does not wait for those before it, so their failures are looked up.
        """
        _wait([self._events[name]])
        for event in list(self._events.values()):
            event.raise_failure()

    def has_run(self, name: str) -> bool:
        """Whether the operation was handed over."""
        return name in self._events

    def events_of(self, kind: Kind) -> list[Event]:
        """Events of the operations of a kind that were handed over."""
        return [event for name, event in self._events.items() if name.startswith(f"{kind}.")]

    def wait_for_all(self) -> None:
        """Return when everything that was handed over has ended; raise what it raised."""
        _wait(list(self._events.values()))

    def forget_events(self) -> None:
        """The step was taken: it cannot be taken twice."""
        self._checks.step_taken()
        self._events.clear()

    def drain(self) -> None:
        """Return when everything that was handed over has ended, well or not."""
        for event in list(self._events.values()):
            with _ignoring_errors():
                event.wait()
            event.settle()


def _wait(events: Iterable[Event]) -> None:
    for event in events:
        event.wait()
        event.settle()


@contextmanager
def _ignoring_errors() -> Iterator[None]:
    """The error was raised already, where the step failed; here only the end matters."""
    try:
        yield
    except Exception:
        return
