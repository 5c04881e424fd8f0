"""Better policies by small changes: on to the best that differs in one layer, or in two that change places.

Where many layers are alike the solver's bound is soon good and its policies are not, for most of them differ in nothing
but the order of layers. A walk looks at all small changes at once (`rows`), takes the best even where it is worse, and
does not undo for a while what it did. What does not fit costs more the longer nothing fits: so it goes along the edge
of the memory, on both sides of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from ortools.math_opt.python import mathopt

from ...jobs.policy import Policy
from ...jobs.policy.artifact import Home
from .choices import Choices
from .counts import Counts
from .problem import Problem, sorts_of
from .rows import Change, Rows
from .timing import Timing
from .variables import Kept

Layer = tuple[Home, tuple[Kept, str] | None]
"""Where a layer's boundary lives, and what is kept of its internals and where."""
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
WORK: Final = 18_000
"""Rows, once for each change, that take as long as one unit of `solver.work_of`."""


class Walk:
    """Walks through the policies of a problem's shape."""

    def __init__(self, problem: Problem) -> None:
        model = mathopt.Model(name="lazytrain-walk")
        self.problem, self.choices = problem, Choices(model, problem)
        self.rows = Rows(model, Timing(self.choices).step)
        self.layers = len(self.choices.layers)
        self.edges = {edge: [v.id for v in variables] for edge, variables in self.choices.edges.items()}
        self.kept = {key: variable.id for key, variable in self.choices.kept.items()}
        self.looked_at = 0
        whats = [None, *dict.fromkeys((kept, home) for _, kept, home in self.kept)]
        homes: list[Home] = ["gpu", *(["host"] if self.choices.has_away else [])]
        homes += ["nvme"] if any(variable is not None for variable in self.choices.nvme) else []
        self.kinds: list[Layer] = [(home, what) for home in homes for what in whats]

    @property
    def work(self) -> int:
        """What was done so far, as in `solver.work_of`."""
        return self.looked_at * len(self.rows.rows) // WORK

    # ---- states

    def state(self, policy: Policy) -> State:
        """A policy as a state; boundaries and internals are on the GPU where this problem has no other place."""
        state: list[Layer] = []
        for layer, home in zip(policy.layers, policy.homes, strict=False):
            what = (layer.internals, layer.internals_home)
            known = layer.internals != "none" and (layer.index, *what) in self.kept
            state.append((home, what if known else None))  # type: ignore[arg-type]
        return tuple(state)

    def spread(self, counts: Counts, more: int = 0) -> State:
        """So many layers of each sort as are counted, evenly spread; ``more`` of them swap their internals."""
        whats: dict[int, tuple[Kept, str]] = {}
        sorts = sorts_of(self.choices.facts)
        for (sort, kept, home), number in sorted(counts.kept.items(), key=lambda item: item[0][2] != "host"):
            free = [i for i in range(self.layers) if sorts[i] == sort and i not in whats]
            number = min(len(free), number + (more if home == "host" else 0))
            for k in range(number):
                i = free[int((k + 0.5) * len(free) / number)]
                whats |= {i: (kept, home)} if (i, kept, home) in self.kept else {}
        on_nvme = {int((k + 0.5) * self.layers / counts.nvme) for k in range(counts.nvme)}
        plain: Home = "host" if self.choices.has_away else "gpu"
        return tuple(("nvme" if i in on_nvme else plain, whats.get(i)) for i in range(self.layers))

    def policy(self, state: State) -> Policy:
        """The policy that a state means."""
        chosen = self.chosen(state)
        return self.choices.decode(_Values(chosen or set()))

    def _end(self, state: State, start: int) -> int:
        """Where the block that begins with layer ``start`` ends."""
        return next((i for i in range(start + 1, self.layers) if state[i][0] != "recompute"), self.layers)

    def _variables(self, state: State, i: int) -> list[int] | None:
        """The variables that are 1 for what a layer does; None if it may not."""
        (home, what), end = state[i], self._end(state, i)
        if home == "recompute":
            return None if what or not i else []
        edge, away = self.edges.get((i, end)), home != "gpu"
        if edge is None or away >= len(edge) or (what and (end > i + 1 or (i, *what) not in self.kept)):
            return None
        on_nvme = self.choices.nvme[i]
        if home == "nvme" and on_nvme is None:
            return None
        return [edge[away], *([self.kept[(i, *what)]] if what else []), *([on_nvme.id] if home == "nvme" else [])]  # type: ignore[index]

    def _some_on_nvme(self, state: State) -> list[int]:
        some = self.choices.some_on_nvme
        return [some.id] if some is not None and any(home == "nvme" for home, _ in state) else []

    def chosen(self, state: State) -> set[int] | None:
        chosen = set(self._some_on_nvme(state))
        for i in range(self.layers):
            variables = self._variables(state, i)
            if variables is None:
                return None
            chosen.update(variables)
        return chosen

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

    def change(self, state: State, move: Move) -> Change | None:
        """What the move changes among the variables; None if it may not be made."""
        then = moved(state, move)
        touched = {i for i, _ in move}
        if any("recompute" in (state[i][0], layer[0]) for i, layer in move):
            touched |= {next((k for k in range(i - 1, -1, -1) if state[k][0] != "recompute"), 0) for i in touched}
            touched |= {next((k for k in range(i - 1, -1, -1) if then[k][0] != "recompute"), 0) for i in touched}
        gone, come = self._some_on_nvme(state), self._some_on_nvme(then)
        for i in touched:
            before, after = self._variables(state, i), self._variables(then, i)
            if before is None or after is None:
                return None
            gone, come = gone + before, come + after
        return gone, come

    # ---- the walk

    def best(self, start: State, enough_s: float = 0.0, seed: int = 0) -> State | None:
        """The fastest state that fits on a walk from ``start``, or the first that takes no more than ``enough_s``.

        ``seed`` decides for how long a layer does not become again what it was: another one is another walk.
        """
        state, chosen = start, self.chosen(start)
        if chosen is None:
            return None
        choose, price, best, best_step, since = random.Random(seed), BEYOND, None, np.inf, 0
        kept_until: dict[tuple[int, Layer], int] = {}
        first = self.rows.least(self.rows.base(chosen), [([], [])])
        if first.beyond[0] <= FITS:
            best, best_step = state, first.step[0]
        for step in range(STEPS):
            found = self._looks(
                state, chosen, price, best_step, {k for k, until in kept_until.items() if until >= step}, step
            )
            if found is None:
                break
            move, change, fits, (fitting_step, fitting) = found
            since += 1
            if fitting is not None and fitting_step < best_step * (1 - FITS):
                best, best_step, since = moved(state, fitting), fitting_step, 0
            if best_step * self.problem.horizon_s <= enough_s or since > PATIENCE:
                break
            kept_until |= {(i, state[i]): step + choose.randint(*KEPT_FOR) for i, _ in move}
            state, chosen = moved(state, move), (chosen - set(change[0])) | set(change[1])
            price *= 1 / DEARER if fits else DEARER
        return best

    def _looks(
        self, state: State, chosen: set[int], price: float, best_step: float, kept: set[tuple[int, Layer]], turn: int
    ) -> tuple[Move, Change, bool, tuple[float, Move | None]] | None:
        """The move to make, and the one to the fastest policy that fits."""
        moves = [(move, change) for move in self.moves(state, turn) if (change := self.change(state, move)) is not None]
        if not moves:
            return None
        self.looked_at += len(moves) + AT_LEAST
        base = self.rows.base(chosen)
        parts = [
            self.rows.least(base, [change for _, change in moves[k : k + AT_ONCE]])
            for k in range(0, len(moves), AT_ONCE)
        ]
        steps, ends, beyond, in_all = (np.concatenate([part[k] for part in parts]) for k in range(4))
        fit = np.where(beyond <= FITS, steps, np.inf)
        costs = steps + EARLIER * ends + price * (beyond + OVERALL * in_all)
        held = np.array([any(change in kept for change in move) for move, _ in moves])
        costs[held & (fit >= best_step * (1 - FITS))] = np.inf
        taken, fastest = int(np.argmin(costs)), int(np.argmin(fit))
        better = moves[fastest][0] if np.isfinite(fit[fastest]) else None
        return (*moves[taken], bool(beyond[taken] <= FITS), (float(fit[fastest]), better))


class _Values(dict[Any, float]):
    """1 for the variables that are chosen, 0 for all others: what a solver would say."""

    def __init__(self, chosen: set[int]) -> None:
        super().__init__()
        self.chosen = chosen

    def __missing__(self, variable: Any) -> float:
        return float(variable.id in self.chosen)


def moved(state: State, move: Move) -> State:
    """The state after a move."""
    changed = list(state)
    for i, layer in move:
        changed[i] = layer
    return tuple(changed)
