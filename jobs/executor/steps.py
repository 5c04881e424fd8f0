"""The order of a step: a program is made for the one that is foreseen, and where the model goes another way, a new one.

The model may run forwards, backwards and evaluations in any order, as in plain PyTorch: several forwards before one
backward, an evaluation between the two, a forward whose backward never comes, fewer micro-batches than the policy says.
A step is foreseen to run as the two before it, if these were alike, else micro-batch by micro-batch as the policy says.
Where it departs from that, everything under way ends, and a program is made for the rest of the step.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ProgramError
from ..model_facts import ModelFacts
from ..policy import Op, Policy, Program, lower, lower_forward
from ..policy.lowering import lower_rest
from ..policy.order import NORMS, Order, Phase, micro_batches
from .devices import Device
from .interpreter import Interpreter
from .parking import Parking, parked_state_bytes
from .stores import ActivationStore, HostUnit
from .transfers import Transfers
from .updates import Updates
from .weights import DeviceWeights


@dataclass(eq=False)
class Turn:
    """One forward with gradients. Autograd's graph holds it: when that is gone, so is the hope of a backward."""

    micro: int


class Steps:
    """Keeps the interpreter in the program whose next phase is what the model does next."""

    def __init__(
        self,
        facts: ModelFacts,
        policy: Policy,
        units: Sequence[HostUnit],
        owner: Sequence[int],
        device: Device,
        nvme_directory: Path,
        transfers: Transfers,
        weights: DeviceWeights,
    ) -> None:
        self.accumulation = policy.accumulation
        self.open_ended = False
        """Whether nobody says how many micro-batches a step has."""
        self.learns = True
        """Whether `step()` ends a step; otherwise the next forward after ``accumulation`` micro-batches does."""
        self.turn: Turn | None = None
        """The forward that runs, or ran last."""
        self.updates = Updates(transfers)
        self._facts, self._policy, self._units, self._owner = facts, policy, units, owner
        self._device, self._directory = device, nvme_directory
        self._transfers, self._weights = transfers, weights
        self.evaluation = lower_forward(facts, weight_slots=policy.weight_slots)
        self.whole: Program | None = None
        """The program with which the step began."""
        self._store = transfers.store = ActivationStore(device, nvme_directory)
        self._seen: deque[Order] = deque(maxlen=2)
        self._start()

    def attach(self, interpreter: Interpreter, pass_over: Callable[[], None]) -> None:
        """``pass_over`` does what is left of the backward that runs."""
        self._run, self._pass_over = interpreter, pass_over

    def _start(self) -> None:
        self._phases: list[Phase] = []
        self._place = -1  # of the phase that runs, in the order of the interpreter's program
        self._turns: dict[int, weakref.ref[Turn]] = {}
        self._micros = 0

    # ---- what the model does next

    def begin_forward(self) -> None:
        """A forward with gradients."""
        self.turn = None
        self._end_phase()
        self._drop_dead()
        if self._phases and self._is_over():
            self.abandon()
        if not self._phases:
            self._begin_step()
        self.turn = Turn(self._micros)
        self._turns[self._micros] = weakref.ref(self.turn)
        self._enter(Phase("forward", self._next_micro()))

    def begin_evaluation(self) -> None:
        """A forward without gradients."""
        self._end_phase()
        self._drop_dead()
        if self._phases and not (self._turns or self.has_gradients):
            self.abandon()
        if self._phases:
            self._enter(Phase("evaluate", self._next_micro()))
            return
        self.updates.wait()
        self._transfers.begin()
        self._run.begin(self.evaluation, {})

    def begin_backward(self, turn: Turn) -> None:
        """The backward of a forward, if it does not run already. Raises ProgramError for one that cannot run."""
        phase = Phase("backward", turn.micro)
        if self._phases and self._phases[-1] == phase and self._left() is not None:
            return
        known = self._turns.pop(turn.micro, None)
        if known is None or known() is not turn:
            raise ProgramError(
                "backward came for a forward whose step is over, or whose backward has run",
                hint="run the backward of each forward once, before step()",
            )
        if self.left_of_backward() is not None:
            self._pass_over()
        self._end_phase()
        self._enter(phase)

    def begin_norms(self) -> None:
        """The end of a step. Raises ProgramError if it has no gradient."""
        if not self.has_gradients or self.left_of_backward() is not None:
            raise ProgramError(
                "step() came before the backward of any micro-batch ended",
                hint="run forward and backward of every micro-batch of the step first",
            )
        if not any(unit.gradient_bytes for unit in self._facts.units):
            raise ProgramError(
                "a step needs something that learns, and every parameter of the model is frozen",
                hint="let some learn (requires_grad) before stream()",
            )
        self._end_phase()
        if self._phases[-1] != NORMS:
            self._enter(NORMS)
            self._run.run_out()
        self._run.wait_for("clip")

    def weights_change(self) -> None:
        """Go on after this with weights that are loaded anew; forwards whose backward has not run are given up."""
        if not self._phases:
            return
        self._end_phase()
        for micro in list(self._turns):
            self._forget(micro)
        self._run.wait_for_all()
        self._place = len(self._run.program.order)  # nothing of this program comes next

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has begun since the last step."""
        return any(phase.kind == "backward" for phase in self._phases)

    @property
    def gradients_are_complete(self) -> bool:
        """Whether, as far as is foreseen, no further micro-batch adds to the step's gradients."""
        rest = self._run.program.order[self._place + 1 :]
        return self.has_gradients and self.left_of_backward() is None and rest in ((), (NORMS,))

    def finish(self) -> None:
        """The step was taken."""
        forwards = {phase.micro for phase in self._phases if phase.kind == "forward"}
        backwards = {phase.micro for phase in self._phases if phase.kind == "backward"}
        if forwards == backwards and self._phases.index(NORMS) == len(self._phases) - 1 and not self.open_ended:
            self._seen.append(tuple(self._phases))
        self.updates.written = self._run.events_of("write_gradient")
        self._run.forget_events()
        self._store.clear()
        self.turn = None
        self._start()

    def abandon(self) -> None:
        """Give up the step that is under way."""
        self._run.drain()
        self.updates.written += self._run.events_of("write_gradient")
        self._store.clear()
        self._transfers.begin()
        self._run.reset(self.evaluation)
        self.turn = None
        self._start()

    def close(self) -> None:
        """Give up what is under way, and free memory and disk."""
        self.abandon()
        self._store.close()
        if self.whole is not None:
            self.updates.wait()
            self._transfers.parking.close()

    @property
    def activation_host_bytes(self) -> int:
        """Host memory held for boundaries, internals and what passes through rings."""
        return self._store.host_bytes + (self._transfers.parking.host_bytes if self.whole else 0)

    # ---- the phase that runs

    def _next_micro(self) -> int:
        self._micros += 1
        return self._micros - 1

    def _is_over(self) -> bool:
        """Whether what is there of the step is not part of one that goes on."""
        backwards = sum(phase.kind == "backward" for phase in self._phases)
        if not backwards:
            return not self._turns
        return not self.learns and not self._turns and backwards >= self.accumulation

    def _left(self) -> Op | None:
        """The next operation of the phase that runs, if it has one."""
        op = self._run.upcoming()
        if not self._phases or op is None:
            return None
        phase = self._phases[-1]
        return op if op.micro == phase.micro and (op.kind == "backward") == (phase.kind == "backward") else None

    def left_of_backward(self) -> Op | None:
        """The next operation of the backward that runs, if one does."""
        op = self._left()
        return op if op is not None and op.kind == "backward" else None

    def _end_phase(self) -> None:
        """The phase that runs is over: an unfinished forward is dropped. Raises ProgramError for half a backward."""
        if self._left() is None:
            return
        phase = self._phases[-1]
        if phase.kind == "backward":
            self.abandon()
            raise ProgramError(
                f"the backward of micro-batch {phase.micro} did not end, so the step's gradients are incomplete: "
                "they were dropped",
                hint="run all micro-batches of this step again",
            )
        self._run.drain()
        self._forget(phase.micro)
        self._place = len(self._run.program.order)  # nothing of this program comes next

    def _drop_dead(self) -> None:
        """Forget forwards whose backward cannot come, because nobody has their graph."""
        for micro, turn in list(self._turns.items()):
            if turn() is None:
                self._forget(micro)

    def _forget(self, micro: int) -> None:
        self._turns.pop(micro, None)
        self._store.forget(micro)
        self._transfers.forget(micro)
        self._weights.drop_for_head(micro)

    # ---- programs

    def _enter(self, phase: Phase) -> None:
        following = self._run.program.order[self._place + 1 : self._place + 2]
        if self._phases and following != (phase,):
            self._reroute(phase)
        else:
            self._place += 1
        self._phases.append(phase)

    def _reroute(self, phase: Phase) -> None:
        """Go on with a program that begins with ``phase``."""
        self._run.wait_for_all()
        self._weights.forget_loaded()
        self._store.forget_read()
        program = lower_rest(self._policy, self._facts, self._guess(phase), gradients=self.has_gradients)
        self._store.reserve(program)
        self._transfers.allocate_gradients(program)
        self._run.begin(program, {})
        self._place = 0

    def _guess(self, phase: Phase) -> Order:
        """How the step may go on after a phase that was not foreseen."""
        if phase.kind == "forward":
            return (phase, Phase("backward", phase.micro), NORMS)
        if phase == NORMS:
            return (NORMS,)
        others = [Phase("backward", micro) for micro in sorted(self._turns, reverse=True) if micro != phase.micro]
        return (phase, *others, NORMS)

    def _begin_step(self) -> None:
        for event in self._run.events_of("write_gradient"):
            event.wait()
        self.updates.wait_for_gradients()  # their buffers are filled again
        order = self._foreseen()
        if self.whole is None or self.whole.order != order:
            program = lower(self._policy, self._facts, order=order, state_bytes=parked_state_bytes(self._units))
            if self.whole is not None:
                self.updates.wait()  # they read from rings
                self._transfers.parking.close()
            self._transfers.parking = Parking(program, self._units, self._owner, self._device, self._directory)
            self._store.reserve(program)
            self.whole = program
        self._transfers.begin()
        self._transfers.allocate_gradients(self.whole)
        self._run.begin(self.whole, self.updates.events)
        self._place = -1

    def _foreseen(self) -> Order:
        if len(self._seen) == 2 and self._seen[0] == self._seen[1]:
            return self._seen[0]
        return micro_batches(1 if self.open_ended else self.accumulation)

    def forget_orders(self) -> None:
        """The order of the steps so far says nothing about those to come."""
        self._seen.clear()
