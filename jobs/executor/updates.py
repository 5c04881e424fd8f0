"""The update phase: the first operations of a step's program, which run while the next forward is under way."""

from __future__ import annotations

from itertools import takewhile

from ..policy import UPDATE_PHASE, Op, Program
from .devices import Event
from .interpreter import Interpreter
from .transfers import PendingUpdate, Transfers


class Updates:
    """Starts the updates of a step that was taken, and knows when each has ended."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self.events: dict[str, Event] = {}
        """By the operation that each is the end of."""
        self.written: list[Event] = []
        """Gradients of the last step on their way to NVMe."""

    def start(self, program: Program, run: Interpreter, update: PendingUpdate) -> None:
        """Update every unit, in the order in which the next forward needs them; read and write what is on NVMe."""
        before = [*self.events.values(), *self.written]  # what is read now was written by the step before
        phase = list(takewhile(lambda op: op.kind in UPDATE_PHASE, program.ops))
        for position, op in enumerate(phase):
            try:
                self.events[op.id] = self._start(op, run, update, before)
            except BaseException as error:  # weights are torn now: whoever waits for any of these must hear of it
                self.events |= {left.id: Event.ended(error) for left in phase[position:]}
                raise

    def _start(self, op: Op, run: Interpreter, update: PendingUpdate, before: list[Event]) -> Event:
        if op.kind == "update":
            work, nbytes = self._transfers.update(op, update), op.bytes
        else:
            work, nbytes = self._transfers.prepare(op)
        after = [self.events[name] for name in op.after]
        return run.submit(op, work, nbytes, [*after, *before] if op.stream == "nvme_read" else after)

    def wait(self) -> None:
        """Return when all have ended. Raises what one of them raised."""
        for event in self.events.values():
            event.wait()

    def wait_for_gradients(self) -> None:
        """Return when the gradients of the last step are on NVMe, and their buffers free."""
        for event in self.written:
            event.wait()
        self.written.clear()

    def last_of(self, unit: int, program: Program | None) -> Event:
        """The end of the unit's last update, its state on NVMe included; one that has ended when there was none."""
        ops = program.ops if program is not None else ()
        ids = [op.id for op in ops if op.kind in ("update", "write_state") and op.unit == unit]
        return self.events.get(ids[-1] if ids else "", Event.ended())
