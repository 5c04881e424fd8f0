"""Proves that a program's waits suffice, whatever the timing of any stream.

Every operation reads and writes **places**: a weight slot, a host buffer, a gradient. Two operations that meet at a
place, one of them writing, must be ordered by the program's waits and streams (happens-before), or a fast link could
overtake a slow one. What a buffer's memory costs and when is a promise too, and holds only if the waits enforce it.

The names of the invariants are in `INVARIANTS`; `check` raises `InvariantBroken` with one of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import InvariantBroken
from ..model_facts import ModelFacts
from .lowering import GRADIENT_STAGING, NVME_STAGING
from .program import Op, Program

INVARIANTS = {
    "made before read": "no operation reads a place before the one that filled it has ended",
    "free before reuse": "a place is filled again only after all that read it have ended",
    "bytes as promised": "no buffer may be held at a moment for which the program does not count it",
    "one update": "each parameter gets one norm and one update per step",
    "loaded once": "each unit computes with its own weights, and each load is used",
    "each once": "every operation of a program runs exactly once in its step",
}


@dataclass(frozen=True, slots=True)
class Hazard:
    """``later`` may only start when ``earlier`` has ended, because both use ``place``."""

    earlier: str
    later: str
    place: str
    invariant: str


@dataclass(frozen=True, slots=True)
class Access:
    """The places that one operation reads and writes."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


def check(program: Program, facts: ModelFacts) -> tuple[Hazard, ...]:
    """Every hazard of the program, all of them covered. Raises InvariantBroken otherwise."""
    if program.whole:
        _check_updates(program, facts)
    used = accesses(program, facts)
    found = tuple(hazards(program, used))
    for hazard in found:
        earlier, later = program.index[hazard.earlier], program.index[hazard.later]
        if not (program.ancestors[later] >> earlier) & 1:
            raise InvariantBroken(
                hazard.invariant, hazard.later, f"it need not wait for {hazard.earlier}, which uses {hazard.place}"
            )
    _check_memory(program)
    return found


def accesses(program: Program, facts: ModelFacts) -> tuple[Access, ...]:
    """What each operation reads and writes, in the program's order."""
    places = _Places(program, facts)
    return tuple(places.of(op) for op in program.ops)


def hazards(program: Program, used: tuple[Access, ...]) -> Iterator[Hazard]:
    """All pairs of operations that must not overlap: each read with the last write, each write with what was before."""
    writer: dict[str, str] = {}
    readers: dict[str, list[str]] = defaultdict(list)
    for op, access in zip(program.ops, used, strict=True):
        for place in access.reads:
            if place in writer:
                yield Hazard(writer[place], op.id, place, "made before read")
            elif program.whole and not place.startswith(_FROM_BEFORE):
                raise InvariantBroken("made before read", op.id, f"nothing has filled {place}")
            readers[place].append(op.id)
        for place in access.writes:
            for earlier in readers.pop(place, []):
                if earlier != op.id:
                    yield Hazard(earlier, op.id, place, "free before reuse")
            if place in writer:
                yield Hazard(writer[place], op.id, place, "free before reuse")
            writer[place] = op.id


_FROM_BEFORE = ("master ", "gradient of ", "state of ", "input 0@")
"""Places that hold something when a step begins: weights, optimizer state, the gradients of the step before, and what
the first unit is given, which matters where that is a layer."""
_TO_AND_FRO = ("offload", "reload", "spill", "fetch")
"""Kinds after which backward finds a boundary elsewhere than forward left it; the first may be another program's."""


class _Places:
    """Names places as the executor assigns them, following the operations in order."""

    def __init__(self, program: Program, facts: ModelFacts) -> None:
        names = [unit.name for unit in facts.units]
        self._owner = [names.index(unit.shares_weights_with or unit.name) for unit in facts.units]
        self._learning = [u for u in sorted(set(self._owner)) if facts.units[u].gradient_bytes]
        self._head = len(facts.units) - 1
        self._on_nvme = {(op.unit, op.micro) for op in program.ops if op.kind == "write"}
        self._swapped = {(op.unit, op.micro) for op in program.ops if op.kind in ("swap_out", "swap_in")}
        self._away = {(op.unit, op.micro) for op in program.ops if op.kind in _TO_AND_FRO}
        self._away |= {(op.unit + 1, op.micro) for op in program.ops if op.kind == "recompute"}
        self._adds = {(op.unit, op.micro) for op in program.ops if op.kind == "accumulate"}
        self._loads: Counter[int] = Counter()
        self._uses: Counter[int] = Counter()
        self._nvme_uses = self._gradient_uses = 0
        self._host, self._nvme, self._swap = _Rooms("host"), _Rooms("nvme"), _Rooms("swapped")
        self._parked = {op.unit for op in program.ops if op.kind == "read_gradient" and op.id.find("@") < 0}
        self._states, self._gradients = _Ring(program, "state"), _Ring(program, "gradient")
        self._staging: dict[tuple[int, int], str] = {}
        self._staged: dict[tuple[int, int], str] = {}
        self._slot_holds: dict[int, int] = {}
        self._unused: dict[int, str] = {}

    def of(self, op: Op) -> Access:
        access: Access = getattr(self, f"_{op.kind}")(op, f"{op.unit}@{op.micro}")
        return access

    # ---- compute

    def _forward(self, op: Op, key: str) -> Access:
        kept = (f"kept {key}",) if op.internals != "none" else ()
        source = (f"input {key}",) if op.unit else ()
        return Access((self._weights(op), *source), (f"input {op.unit + 1}@{op.micro}", *kept))

    def _loss(self, op: Op, key: str) -> Access:
        return Access((self._weights(op), f"input {key}"), (f"device gradient {key}",))

    def _recompute(self, op: Op, key: str) -> Access:
        return Access((self._weights(op), self._input(op)), (f"input again {op.unit + 1}@{op.micro}",))

    def _backward(self, op: Op, key: str) -> Access:
        if op.unit == self._head:
            return Access((f"device gradient {key}",), (f"device gradient {key}",))  # scaled in place
        again = " again" if (op.unit, op.micro) in self._swapped else ""
        kept = (f"kept{again} {key}",) if op.internals != "none" else ()
        source = (self._input(op),) if op.unit or (op.unit, op.micro) in self._away else ()
        return Access((self._weights(op), *source, *kept), (f"device gradient {key}",))

    def _input(self, op: Op) -> str:
        """Where backward finds the boundary: where forward left it, or where it was brought back to."""
        again = " again" if (op.unit, op.micro) in self._away else ""
        return f"input{again} {op.unit}@{op.micro}"

    def _weights(self, op: Op) -> str:
        if op.slot < 0:
            self._uses[op.unit] += 1
            return f"weights {op.unit}.{self._uses[op.unit]}"
        if self._slot_holds.get(op.slot) != op.unit:
            raise InvariantBroken("loaded once", op.id, f"slot {op.slot} does not hold its weights")
        self._unused.pop(op.slot, None)
        return f"slot {op.slot}"

    # ---- transfers

    def _load(self, op: Op, key: str) -> Access:
        source = f"master {self._owner[op.unit]}"
        if op.slot < 0:
            self._loads[op.unit] += 1
            return Access((source,), (f"weights {op.unit}.{self._loads[op.unit]}",))
        if op.slot in self._unused or op.unit in self._slot_holds.values():
            unused = self._unused.get(op.slot, op.id)
            raise InvariantBroken("loaded once", unused, "its weights are not used, or were there already")
        self._slot_holds[op.slot], self._unused[op.slot] = op.unit, op.id
        return Access((source,), (f"slot {op.slot}",))

    def _offload(self, op: Op, key: str) -> Access:
        into = self._next_staging(op) if (op.unit, op.micro) in self._on_nvme else self._host.take(op)
        return Access((f"input {key}",), (into,))

    def _write(self, op: Op, key: str) -> Access:
        return Access((self._staging.pop((op.unit, op.micro)),), (self._nvme.take(op),))

    def _read(self, op: Op, key: str) -> Access:
        return Access((self._nvme.give_back(op),), (self._next_staging(op),))

    def _reload(self, op: Op, key: str) -> Access:
        source = self._staging.pop((op.unit, op.micro), "") or self._host.give_back(op)
        return Access((source,), (f"input again {key}",))

    def _spill(self, op: Op, key: str) -> Access:
        return Access((f"input {key}",), (self._nvme.take(op),))

    def _fetch(self, op: Op, key: str) -> Access:
        return Access((self._nvme.give_back(op),), (f"input again {key}",))

    def _next_staging(self, op: Op) -> str:
        self._nvme_uses += 1
        place = self._staging[op.unit, op.micro] = f"staging {self._nvme_uses % NVME_STAGING}"
        return place

    def _swap_out(self, op: Op, key: str) -> Access:
        return Access((f"kept {key}",), (self._swap.take(op),))

    def _swap_in(self, op: Op, key: str) -> Access:
        return Access((self._swap.give_back(op),), (f"kept again {key}",))

    # ---- gradients

    def _gradient(self, op: Op, key: str) -> Access:
        if (op.unit, op.micro) not in self._adds:
            return Access((f"device gradient {key}",), (self._gradient_of(op, arrives=True),))
        self._gradient_uses += 1
        staged = self._staged[op.unit, op.micro] = f"gradient staging {self._gradient_uses % GRADIENT_STAGING}"
        return Access((f"device gradient {key}",), (staged,))

    def _accumulate(self, op: Op, key: str) -> Access:
        into = self._gradient_of(op)
        return Access((self._staged.pop((op.unit, op.micro)), into), (into,))

    def _norm(self, op: Op, key: str) -> Access:
        return Access((self._gradient_of(op),), (f"squares {op.unit}",))

    def _clip(self, op: Op, key: str) -> Access:
        return Access(tuple(f"squares {owner}" for owner in self._learning), ("clip",))

    def _update(self, op: Op, key: str) -> Access:
        state = self._states.of(op.unit)
        return Access((self._gradient_of(op), *state), (f"master {op.unit}", *state))

    def _gradient_of(self, op: Op, *, arrives: bool = False) -> str:
        """A master's gradient: its own buffer, or for one on NVMe the ring's that it is in or now comes to."""
        owner = self._owner[op.unit]
        if owner not in self._parked:
            return f"gradient of {owner}"
        return self._gradients.take(owner) if arrives else self._gradients.of(owner)[0]

    # ---- on NVMe

    def _read_state(self, op: Op, key: str) -> Access:
        return Access((f"state of {op.unit} on nvme",), (self._states.take(op.unit),))

    def _write_state(self, op: Op, key: str) -> Access:
        return Access(self._states.of(op.unit), (f"state of {op.unit} on nvme",))

    def _read_gradient(self, op: Op, key: str) -> Access:
        owner = self._owner[op.unit]
        return Access((f"gradient of {owner} on nvme",), (self._gradients.take(owner),))

    def _write_gradient(self, op: Op, key: str) -> Access:
        owner = self._owner[op.unit]
        return Access(self._gradients.of(owner), (f"gradient of {owner} on nvme",))


class _Rooms:
    """A unit's rooms at a home: a micro-batch takes the one that was given back last, or a new one."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._free: dict[int, list[str]] = defaultdict(list)
        self._taken: dict[tuple[int, int], str] = {}
        self._made: Counter[int] = Counter()

    def take(self, op: Op) -> str:
        if not self._free[op.unit]:
            self._free[op.unit].append(f"{self._home} {op.unit}.{self._made[op.unit]}")
            self._made[op.unit] += 1
        self._taken[op.unit, op.micro] = self._free[op.unit].pop()
        return self._taken[op.unit, op.micro]

    def give_back(self, op: Op) -> str:
        """The room, which is free from here on; of another program's operation, one that nobody else has."""
        place = self._taken.pop((op.unit, op.micro), f"{self._home} {op.unit} of {op.micro}")
        self._free[op.unit].append(place)
        return place


class _Ring:
    """Host buffers through which units' states or gradients pass in turn."""

    def __init__(self, program: Program, what: str) -> None:
        self._what = what
        self._count = sum(buffer.name.startswith(f"{what}_ring.") for buffer in program.buffers)
        self._uses = 0
        self._of: dict[int, str] = {}

    def take(self, unit: int) -> str:
        self._of[unit] = f"{self._what} ring {self._uses % self._count}"
        self._uses += 1
        return self._of[unit]

    def of(self, unit: int) -> tuple[str, ...]:
        """The buffer that the unit was given last; none if it never needs one."""
        return (self._of[unit],) if unit in self._of else ()


def _check_memory(program: Program) -> None:
    for buffer, now, promised in zip(program.buffers, program.moments, program.promised, strict=True):
        if now[0] < promised[0]:
            raise InvariantBroken("bytes as promised", buffer.acquired_by, f"{buffer.name} may be acquired too early")
        if now[1] > promised[1]:
            late = buffer.released_by[-1] if buffer.released_by else "the end"
            raise InvariantBroken("bytes as promised", late, f"{buffer.name} may be held too long")


def _check_updates(program: Program, facts: ModelFacts) -> None:
    owners = {u for u, unit in enumerate(facts.units) if unit.gradient_bytes and not unit.shares_weights_with}
    for kind in ("norm", "update"):
        count = Counter(op.unit for op in program.ops if op.kind == kind)
        for unit in sorted(owners | count.keys()):
            if count[unit] != 1 or unit not in owners:
                raise InvariantBroken("one update", f"{kind} of {facts.units[unit].name}", f"{count[unit]} in one step")
