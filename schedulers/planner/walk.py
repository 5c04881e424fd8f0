"""Better policies by small changes: on to the best that differs in one layer, or in two that change places.

Where many layers are alike the solver's bound is soon good and its policies are not, for most of them differ in nothing
but the order of layers. A walk looks at all small changes at once (`rows`), takes the best even where it is worse, and
does not undo for a while what it did. What does not fit costs more the longer nothing fits: so it goes along the edge
of the memory, on both sides of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Literal, NamedTuple

import numpy as np

from ...jobs.policy import Policy
from ...jobs.policy.artifact import Home
from .choices import Choices
from .counts import Counts, spread
from .linear import Model
from .problem import Problem, sorts_of
from .rows import Change, Least, Rows
from .timing import Timing
from .variables import Kept

What = tuple[Kept, Literal["gpu", "host"]]
"""What is kept of a layer's internals, and where."""
Layer = tuple[Home, What | None]
"""Where a layer's boundary lives, and what of its internals does where."""
State = tuple[Layer, ...]
Move = tuple[tuple[int, Layer], ...]
"""Layers that change, and to what."""
STEPS: Final = 60
"""Most steps of one walk."""
PATIENCE: Final = 25
"""Steps without a better policy after which a walk ends."""
LOOKED_AT: Final = 24
"""Of so many layers a step looks at all moves, of twice as many at those of every second layer, and so on in turns."""
FAR: Final = 8
"""Two layers that change places are no farther from each other than this."""
KEPT_FOR: Final = (4, 14)
"""For how many steps, between these, a layer does not become again what it was."""
EARLIER: Final = 0.02
"""What it is worth that operations end earlier on average, of what it is worth that the step does."""
BEYOND: Final = 0.002
"""What a boundary's bytes more than there is room for cost at first, as a share of the horizon."""
OVERALL: Final = 0.1
"""What one costs at every moment at which there is no room for it, beside the worst moment."""
DEARER: Final = 1.25
"""By so much memory gets dearer after a step to what does not fit, and cheaper after one to what does."""
FITS: Final = 1e-9
AT_ONCE: Final = 2048
"""Changes that are looked at together."""
AT_LEAST: Final = 300
"""So many changes take as long as beginning to look at any."""
WORK: Final = 32_000
"""Rows, once for each change, that take as long as one unit of `solver.work_of`."""


class Walk:
    """Walks through the policies of a problem's shape."""

    def __init__(self, problem: Problem) -> None:
        model = Model(name="lazytrain-walk")
        self.problem, self.choices = problem, Choices(model, problem)
        self.rows = Rows(model, Timing(self.choices).step)
        self.layers = len(self.choices.layers)
        self.edges = {edge: [v.id for v in variables] for edge, variables in self.choices.edges.items()}
        self.kept = {key: variable.id for key, variable in self.choices.kept.items()}
        self.variables = cache(self._variables)
        self.looked_at = 0
        whats = [None, *dict.fromkeys((kept, home) for _, kept, home in self.kept)]
        homes: list[Home] = ["gpu"]
        homes += ["host"] if self.choices.has_away else []
        homes += ["nvme"] if any(variable is not None for variable in self.choices.nvme) else []
        self.kinds: list[Layer] = [(home, what) for home in homes for what in whats]

    @property
    def work(self) -> int:
        """What was done so far, as in `solver.work_of`."""
        return self.looked_at * len(self.rows.rows) // WORK

    # ---- states

    def state(self, policy: Policy) -> State:
        """A policy as a state; internals that this problem has no place for are not kept."""
        state: list[Layer] = []
        for layer, home in zip(policy.layers, policy.homes, strict=False):
            what = (layer.internals, layer.internals_home)
            known = layer.internals != "none" and (layer.index, *what) in self.kept
            state.append((home, what if known else None))  # type: ignore[arg-type]
        return tuple(state)

    def spread(self, counts: Counts, more: int = 0) -> State:
        """So many layers of each sort as are counted, evenly spread; ``more`` of them swap their internals.

        Of the boundaries that are not on NVMe as many are in host memory as there is room for.
        """
        whats = self._spread_kept(counts, more)
        homes: list[Home] = ["gpu"] * self.layers
        for i in spread(range(self.layers), counts.nvme):
            homes[i] = "nvme"
        others = [i for i in range(self.layers) if homes[i] == "gpu"]
        for i in spread(others, min(len(others), self._host_boundaries(whats))):
            homes[i] = "host"
        return tuple((home, whats.get(i)) for i, home in enumerate(homes))

    def _spread_kept(self, counts: Counts, more: int) -> dict[int, What]:
        whats: dict[int, What] = {}
        sorts = sorts_of(self.choices.facts)
        for (sort, kept, home), number in sorted(counts.kept.items(), key=lambda item: item[0][2] != "host"):
            free = [i for i in range(self.layers) if sorts[i] == sort and i not in whats]
            for i in spread(free, min(len(free), number + (more if home == "host" else 0))):
                whats |= {i: (kept, home)} if (i, kept, home) in self.kept else {}
        return whats

    def _host_boundaries(self, whats: Mapping[int, What]) -> int:
        """How many boundaries there is host memory for, beside swapped internals."""
        layers = self.choices.facts.layers
        swapped = sum(layers[i].kept_bytes(kept) for i, (kept, home) in whats.items() if home == "host")
        room = self.choices.host_room - swapped
        return max(0, room // max(self.choices.sizes)) if self.choices.has_away else 0

    def policy(self, state: State) -> Policy:
        """The policy that a state means."""
        chosen = self.chosen(state) or set()
        return self.choices.decode([float(v in chosen) for v in range(len(self.choices.model.lower))])

    def _variables(self, i: int, layer: Layer, end: int) -> tuple[int, ...] | None:
        """The variables that are 1 where a layer does this and its block ends there; None if it may not."""
        home, what = layer
        if home == "recompute":
            return None if what or not i else ()
        edge, away, on_nvme = self.edges.get((i, end)), home != "gpu", self.choices.nvme[i]
        if edge is None or away >= len(edge) or (what and (end > i + 1 or (i, *what) not in self.kept)):
            return None
        chosen = [edge[away]]
        if home == "nvme":
            if on_nvme is None:
                return None
            chosen.append(on_nvme.id)
        return (*chosen, self.kept[(i, *what)]) if what else tuple(chosen)

    def _some(self, on_nvme: int) -> Iterable[int]:
        """The variable that is 1 where so many boundaries are on NVMe."""
        some = self.choices.some_on_nvme
        return [some.id] if on_nvme and some is not None else []

    def chosen(self, state: State) -> set[int] | None:
        """The variables that are 1 in a state; None if it is none of this problem's."""
        chosen: set[int] = set()
        for i, (layer, end) in enumerate(zip(state, _ends(state), strict=True)):
            variables = self.variables(i, layer, end)
            if variables is None:
                return None
            chosen.update(variables)
        return chosen.union(self._some(_on_nvme(state)))

    # ---- moves

    def moves(self, state: State, turn: int) -> Iterator[Move]:
        """Those of the layers whose turn it is, alone or with one above them."""
        turns = max(1, self.layers // LOOKED_AT)
        for i, layer in list(enumerate(state))[turn % turns :: turns]:
            for kind in self.kinds:
                if kind != layer:
                    yield ((i, kind),)
            if i and self.problem.longest_block > 1 and layer[0] != "recompute":
                before = ((i - 1, (state[i - 1][0], None)),) if state[i - 1][1] else ()
                yield ((i, ("recompute", None)), *before)
            for j in range(i + 1, min(self.layers, i + FAR + 1)):
                if state[j] != layer:
                    yield ((i, state[j]), (j, layer))

    def changes(self, state: State, turn: int) -> list[tuple[Move, Change]]:
        """The moves of this turn that may be made, with what they change among the variables."""
        ends, on_nvme = _ends(state), _on_nvme(state)
        changes = ((move, self._change(state, ends, on_nvme, move)) for move in self.moves(state, turn))
        return [(move, change) for move, change in changes if change is not None]

    def _change(self, state: State, ends: Sequence[int], on_nvme: int, move: Move) -> Change | None:
        """What the move changes; None if it may not be made."""
        touched, ends_then = move, ends
        if any("recompute" in (state[i][0], layer[0]) for i, layer in move):
            then = moved(state, move)
            starts = {_start(states, i) for i, _ in move for states in (state, then)}
            touched, ends_then = tuple((i, then[i]) for i in starts.union(i for i, _ in move)), _ends(then)
        gone, come, more = [*self._some(on_nvme)], list[int](), 0
        for i, layer in touched:
            before, after = self.variables(i, state[i], ends[i]), self.variables(i, layer, ends_then[i])
            if before is None or after is None:
                return None
            gone += before
            come += after
            more += (layer[0] == "nvme") - (state[i][0] == "nvme")
        return gone, [*come, *self._some(on_nvme + more)]

    # ---- the walk

    def best(self, start: State, enough_s: float = 0.0, seed: int = 0, most_work: float = math.inf) -> State | None:
        """The fastest state that fits on a walk from ``start``, or the first that takes no more than ``enough_s``.

        None where nothing on the way fits, or where ``start`` is not a state of this problem. ``seed`` decides for how
        long a layer does not become again what it was: another one is another walk. It ends after ``most_work``.
        """
        chosen, choose, until = self.chosen(start), random.Random(seed), self.work + most_work
        if chosen is None:
            return None
        way = _Way(start, chosen)
        first = self.rows.least(self.rows.base(chosen), [([], [])])
        if first.beyond[0] <= FITS:
            way.best, way.best_step = start, first.step[0]
        for turn in range(STEPS):
            seen = self._look(way, turn)
            if seen is None:
                break
            way.note(seen)
            enough = way.best_step * self.problem.horizon_s <= enough_s
            if enough or way.since > PATIENCE or self.work >= until:
                break
            way.go(seen, turn, choose)
        return way.best

    def _look(self, way: _Way, turn: int) -> _Seen | None:
        """What the moves lead to whose turn it is; None if there is none."""
        moves = self.changes(way.state, turn)
        if not moves:
            return None
        self.looked_at += len(moves) + AT_LEAST
        base = self.rows.base(way.chosen)
        pieces = [moves[k : k + AT_ONCE] for k in range(0, len(moves), AT_ONCE)]
        parts = [self.rows.least(base, [change for _, change in piece]) for piece in pieces]
        least = Least(*(np.concatenate(part) for part in zip(*parts, strict=True)))
        fitting = np.where(least.beyond <= FITS, least.step, np.inf)
        costs = least.step + EARLIER * least.ends + way.price * (least.beyond + OVERALL * least.in_all)
        held = np.array([way.undoes(move, turn) for move, _ in moves])
        costs[held & (fitting >= way.best_step * (1 - FITS))] = np.inf
        taken, fastest = int(np.argmin(costs)), int(np.argmin(fitting))
        better = moves[fastest][0] if np.isfinite(fitting[fastest]) else None
        return _Seen(*moves[taken], bool(least.beyond[taken] <= FITS), better, float(fitting[fastest]))


class _Seen(NamedTuple):
    """The move to make, what it changes and whether it fits; the move to the fastest policy that does, and its step."""

    move: Move
    change: Change
    fits: bool
    fastest: Move | None
    fastest_step: float


@dataclass
class _Way:
    """Where a walk is, and what it has seen."""

    state: State
    chosen: set[int]
    price: float = BEYOND
    best: State | None = None
    best_step: float = float("inf")
    since: int = 0
    """Steps since the best state was found."""
    kept_until: dict[tuple[int, Layer], int] = field(default_factory=dict)

    def note(self, seen: _Seen) -> None:
        """Keep the fastest state that fits."""
        self.since += 1
        if seen.fastest is not None and seen.fastest_step < self.best_step * (1 - FITS):
            self.best, self.best_step, self.since = moved(self.state, seen.fastest), seen.fastest_step, 0

    def go(self, seen: _Seen, turn: int, choose: random.Random) -> None:
        """Make the move, which is not to be undone for a while."""
        self.kept_until |= {(i, self.state[i]): turn + choose.randint(*KEPT_FOR) for i, _ in seen.move}
        gone, come = seen.change
        self.state, self.chosen = moved(self.state, seen.move), (self.chosen - set(gone)) | set(come)
        self.price *= 1 / DEARER if seen.fits else DEARER

    def undoes(self, move: Move, turn: int) -> bool:
        """Whether it makes of a layer what that was a short while ago."""
        return any(self.kept_until.get(change, -1) >= turn for change in move)


def _ends(state: State) -> list[int]:
    """Where the block that begins with each layer would end."""
    ends = [len(state)] * len(state)
    for i in range(len(state) - 2, -1, -1):
        ends[i] = ends[i + 1] if state[i + 1][0] == "recompute" else i + 1
    return ends


def _on_nvme(state: State) -> int:
    return sum(home == "nvme" for home, _ in state)


def _start(state: State, i: int) -> int:
    """Where the block before boundary ``i`` begins."""
    return next((k for k in range(i - 1, -1, -1) if state[k][0] != "recompute"), 0)


def moved(state: State, move: Move) -> State:
    """The state after a move."""
    changed = list(state)
    for i, layer in move:
        changed[i] = layer
    return tuple(changed)
