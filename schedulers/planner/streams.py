"""The streams of a step and its updates, as linear constraints: what each operation waits for, and when the step ends.

One variable for the end of each operation, one constraint for each that it waits for; times are in units of the
problem's horizon. Of more than two micro-batches, those after the first are one: it begins at time zero, when all that
those before it had to do is done, and takes its time as often as there are such. No step is faster than that says.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from ...jobs.model_facts import UnitFacts
from ...jobs.policy.lowering import GRADIENT_STAGING
from ...jobs.policy.parked import RING, update_phase
from ..costs import HOST_PASSES, LINK_RATES, forward_seconds, op_seconds, update_traffic
from .choices import Choices
from .linear import fast_sum
from .problem import Shape
from .variables import Term


class Streams:
    """What `timing` builds on: the last operation of each stream, and how long all of them take."""

    step: Term

    def __init__(self, choices: Choices, shape: Shape) -> None:
        self.choices, self.problem = choices, choices.problem
        self.model, self.facts, self.profile = choices.model, choices.facts, choices.problem.profile
        self.scale = 1 / self.problem.horizon_s
        self.units, self.first, self.layers = self.facts.units, len(self.facts.before), len(self.facts.layers)
        self.head = len(self.units) - 1
        self.staging = shape.staging_slots
        self.parked = self.problem.parked(shape)
        by_name = {unit.name: i for i, unit in enumerate(self.units)}
        self.owner = [by_name.get(unit.shares_weights_with, i) for i, unit in enumerate(self.units)]
        self.parts_total = {u: self.owner.count(u) * self.problem.micro_batches for u in set(self.owner)}
        self.parts_left = Counter(self.parts_total)
        self.lasting: dict[str, list[Term]] = defaultdict(list)  # how long each operation takes, per stream
        self.norms: list[float] = []  # how long those take that only the last of many alike micro-batches has
        self.once: dict[str, int] = {}  # how many of these belong to what was before the micro-batch that began again
        self.begun: Term = 0.0  # when the last micro-batch did whose times begin at zero
        self._begin()

    def _begin(self) -> None:
        """Nothing has run yet."""
        self.last: dict[str, Term] = defaultdict(float)
        self.mains: list[Term] = []  # ends of compute operations but recomputes
        self.gradients: list[Term] = []
        self.accumulates: list[Term] = []
        self.gradient_ring: list[Term] = []
        self.written: dict[int, Term] = defaultdict(float)
        self.updated: list[Term] = [0.0] * len(self.units)

    @property
    def _began_again(self) -> bool:
        return bool(self.once)

    def _begin_again(self) -> dict[str, Term]:
        """The last micro-batch begins, at time zero; when each stream had ended what was before it."""
        before = self.last
        for owner, left in self.parts_left.items():
            self.parts_left[owner] = left - self.owner.count(owner) * self.problem.repeats
        self.once = {stream: len(lasting) for stream, lasting in self.lasting.items()}
        self._begin()
        return before

    def _add_step(self, before: dict[str, Term] | None = None) -> None:
        """The end of the step, ``before`` whose last micro-batch, if it began again, streams had ended so."""
        # where the first units are frozen, the step ends with their backward, of which nothing is left to do
        ends = [self.last[stream] for stream in ("compute", "cpu", "nvme_write", "norm")]
        if before is None:
            self.step = self._end(0.0, *ends)
            return
        repeats = self.problem.repeats
        self.begun = before["compute"] + repeats * self.last["compute"]
        self.step = self._end(0.0, *(self.begun + end for end in ends))
        for stream in [*LINK_RATES, "cpu"]:
            each = fast_sum(self.lasting[stream][self.once.get(stream, 0) :])
            rest = sum(self.norms) if stream == "cpu" else 0.0
            self.model.add_linear_constraint(self.step >= before[stream] + (1 + repeats) * each + rest)
            self.lasting[stream] += [repeats * each, rest]

    # ---- building blocks

    def _end(self, duration: Term, *after: Term) -> Term:
        """End of an operation that lasts ``duration`` and waits for all of ``after``."""
        end = self.model.add_variable(lb=0.0, ub=1.0)
        for other in after:
            self.model.add_linear_constraint(end >= other + duration)
        return end

    def _on(self, stream: str, duration: Term, *after: Term) -> Term:
        self.last[stream] = self._end(duration, self.last[stream], *after)
        self.lasting[stream].append(duration)
        return self.last[stream]

    def _add_gradient(self, u: int) -> None:
        """Copy a gradient out, add it to what its master has, and sum its squares when it is the last."""
        owner, size = self.owner[u], self.units[u].gradient_bytes
        if not size:
            return  # all of it is frozen
        adds = self.parts_left[owner] < self.parts_total[owner]
        waits = [self.mains[-1]]
        if adds and len(self.accumulates) >= GRADIENT_STAGING:
            waits.append(self.accumulates[-GRADIENT_STAGING])
        parked = owner in self.parked.gradients
        on_host, profile = self._host_gradient_bytes(owner), self.profile
        empty = [self.gradient_ring[-RING]] if parked and len(self.gradient_ring) >= RING else []
        sums: list[Term] = []
        if parked and adds:
            sums = [
                self._on("nvme_read", on_host * self._per_byte(profile.nvme_read_bytes_s), self.written[owner], *empty)
            ]
        landed = self._on("d2h", size * self._per_byte(profile.d2h_bytes_s), *waits, *([] if adds else empty))
        self.gradients.append(landed)
        per_byte = self._per_byte(profile.host_bytes_s)
        if adds:
            landed = self._on("cpu", HOST_PASSES["accumulate"] * size * per_byte, landed, *sums)
            self.accumulates.append(landed)
        self.parts_left[owner] -= 1
        if not self.parts_left[owner]:
            landed = self._norm(HOST_PASSES["norm"] * self.units[owner].gradient_bytes * per_byte, landed)
        if parked:
            self.written[owner] = self._on("nvme_write", on_host * self._per_byte(profile.nvme_write_bytes_s), landed)
            self.gradient_ring.append(self.written[owner])

    def _norm(self, duration: float, landed: Term) -> Term:
        """Sum a gradient's squares; where micro-batches repeat, beside the CPU's other work, which all of them have."""
        if not self._began_again:
            return self._on("cpu", duration, landed)
        self.norms.append(duration)
        self.last["norm"] = self._end(duration, landed)
        return self.last["norm"]

    def _wait(self, end: Term, duration: Term, other: Term, condition: Term) -> None:
        """``end`` comes ``duration`` after ``other`` where ``condition`` is 1 and not 0."""
        self.model.add_linear_constraint(end >= other + duration - (1 - condition))

    def _compute(self, forwards: Term, unit: UnitFacts, *after: Term) -> Term:
        """A compute operation other than a recompute."""
        end = self._on("compute", forwards * self._forward(unit) + self._overhead, *self._gradients_due(), *after)
        self.mains.append(end)
        return end

    @property
    def _overhead(self) -> float:
        return self.profile.operation_overhead_s * self.scale

    def _forward(self, unit: UnitFacts) -> float:
        return forward_seconds(unit, self.facts, self.profile) * self.scale

    def _gradients_due(self) -> list[Term]:
        return self.gradients[-self.staging :][:1] if len(self.gradients) >= self.staging else []

    def _per_byte(self, rate: float) -> float:
        return self.scale / rate

    def _add_updates(self) -> None:
        """The updates of the step before: nothing in them is chosen, so their times are numbers."""
        learning = [u for u, unit in enumerate(self.units) if self.owner[u] == u and unit.gradient_bytes]
        labels, sizes = [str(u) for u in range(len(self.units))], [unit.gradient_bytes for unit in self.units]
        ends: dict[str, float] = {}
        for op in update_phase(self.parked, learning, labels, sizes, self._host_gradient_bytes):
            lasts = op_seconds(op, self.facts, self.profile) * self.scale
            ends[op.id] = max([self.last[op.stream], *(ends[name] for name in op.after)]) + lasts
            self.last[op.stream] = ends[op.id]
            if op.stream != "cpu":
                self.lasting[op.stream].append(lasts)
        self.updated = [ends.get(f"update.{owner}", 0.0) for owner in self.owner]
        self.gradient_ring = [ends[f"update.{u}"] for u in learning if u in self.parked.gradients]

    def _host_gradient_bytes(self, unit: int) -> int:
        elements = self.units[unit].gradient_bytes // self.facts.element_bytes
        return elements * (4 if self.parts_total[unit] > 1 else self.facts.element_bytes)

    def _add_host_memory(self) -> None:
        """All that reads or writes host memory shares its bandwidth."""
        profile = self.profile
        updates = sum(self.units[u].trainable_parameters for u in set(self.owner)) * update_traffic(profile)
        moved = [updates / profile.host_bytes_s * self.scale, *self.lasting["cpu"]]
        for stream, rate in LINK_RATES.items():
            share = float(getattr(profile, rate)) / profile.host_bytes_s
            moved.append(share * fast_sum(self.lasting[stream]))
        self.model.add_linear_constraint(self.step >= fast_sum(moved))
