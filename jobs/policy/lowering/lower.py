"""Runs the parts of the lowering in turn, and makes one list of operations of what they placed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ...errors import ProgramError
from ...model_facts import ModelFacts
from ..artifact import Home, Policy
from ..order import NORMS, Order, Phase, micro_batches
from ..parked import Parked, update_phase
from ..program import Buffer, Op, Program
from ..waits import without_implied
from .boundaries import Boundaries
from .draft import Draft
from .gradients import Gradients
from .internals import Kept
from .leaving import Leaving
from .memory import hold_results, hold_static
from .weights import Loads


def lower(
    policy: Policy, facts: ModelFacts, *, order: Order = (), state_bytes: Mapping[int, int] | None = None
) -> Program:
    """The program of one training step. Raises ProgramError for a policy made for other facts.

    ``order`` is by default forward and backward of each of the policy's micro-batches in turn. In another order, every
    forward must have its backward, and `NORMS` is the last phase. ``state_bytes`` are the true bytes, by unit, of
    optimizer state on NVMe; without them the 8-bit optimizer's count.
    """
    policy.check(facts)
    order = tuple(order) or micro_batches(policy.accumulation)
    return _program(Draft(policy, facts, Parked.of(policy, facts, state_bytes), order), whole=True, some_there=False)


def lower_rest(policy: Policy, facts: ModelFacts, order: Order, *, gradients: bool) -> Program:
    """Phases with which a step goes on, when all before them have ended, in another order than was thought.

    ``gradients`` says whether the step has some already, to which those of these phases are to be added. Raises
    ProgramError where these are on NVMe, whose room is given out before the step.
    """
    parked = Parked.of(policy, facts)
    if parked.gradients and any(phase.kind in ("backward", "norms") for phase in order):
        raise ProgramError(
            "gradients on NVMe need a step of the policy's micro-batches, forward and backward in turn",
            hint="set streamed.accumulation before a step that has fewer or more, or plan with gradients on the host",
        )
    draft = Draft(policy, facts, Parked(parked.state, frozenset()), tuple(order))
    return _program(draft, whole=False, some_there=gradients)


def lower_forward(facts: ModelFacts, *, weight_slots: int = 2) -> Program:
    """The program of one forward pass without gradients: what evaluation and generation run."""
    homes: list[Home] = ["gpu"] * (len(facts.layers) + 1)
    policy = Policy.from_homes(facts, homes, weight_slots=weight_slots)
    return lower_rest(policy, facts, (Phase("evaluate", 0),), gradients=False)


def _program(draft: Draft, *, whole: bool, some_there: bool) -> Program:
    """Place every transfer and buffer around the compute operations."""
    loads, leaving = Loads(draft), Leaving(draft)
    boundaries, kept = Boundaries(draft, loads, leaving), Kept(draft, loads, leaving)
    gradients = Gradients(draft, leaving, some_there=some_there)
    updates = _updates(draft, gradients) if whole else []
    gradients.after_updates(updates)
    for position, compute in enumerate(draft.computes):
        leaving.wait(position, compute)
        loads.place(position, compute)
        boundaries.place(position, compute)
        kept.place(position, compute)
        gradients.place(position, compute)
        hold_results(draft, compute)
        loads.remember(position, compute)
    norms = gradients.place_norms() if NORMS in draft.order else []
    hold_static(draft, loads.resident, gradients)
    ops = (*updates, *draft.in_order(), *_clip(norms))
    return _finished(ops if whole else _without_waits_for_others(ops), draft, whole=whole)


def _finished(ops: Sequence[Op], draft: Draft, *, whole: bool) -> Program:
    known = {op.id for op in ops}
    buffers = tuple(_within(buffer, known) for buffer in draft.buffers)
    program = Program(without_implied(ops), buffers, draft.order, whole)
    return replace(program, promised=program.moments)


def _updates(draft: Draft, gradients: Gradients) -> list[Op]:
    """Apply the gradients of the step before, in the order in which the forward pass needs the weights."""
    sizes = [unit.gradient_bytes for unit in draft.units]
    return update_phase(draft.parked, draft.learning, draft.labels, sizes, gradients.host_bytes)


def _clip(norms: list[str]) -> list[Op]:
    """The clip factor needs every norm; the next step's updates need it."""
    return [Op("clip", "clip", "cpu", -1, after=tuple(norms))] if norms else []


def _without_waits_for_others(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Without the waits for operations of other programs, which have ended."""
    known = {op.id for op in ops}
    return tuple(replace(op, after=tuple(name for name in op.after if name in known)) for op in ops)


def _within(buffer: Buffer, known: Collection[str]) -> Buffer:
    """The buffer as far as this program has to do with it: all along where another acquires or releases it."""
    return replace(
        buffer,
        acquired_by=buffer.acquired_by if buffer.acquired_by in known else "",
        released_by=buffer.released_by if all(name in known for name in buffer.released_by) else (),
    )
