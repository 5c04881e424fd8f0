"""The one choice that a solver makes: which jobs take which free GPUs, for jobs of equal priority.

A bid offers to start one job on one node and says what that is worth. Bids are chosen so that every limit holds and the
worth of all is highest. Where jobs on a node together ask for more than a link gives, all of them slow down, and each
loses the same share of what a job is worth on average.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from ortools.sat.python import cp_model

UNIT: Final = 10_000
"""Whole units of worth, and of a link's bandwidth: the solver counts in whole numbers."""
Status = Literal["OPTIMAL", "FEASIBLE", "FALLBACK", "NOTHING"]


@dataclass(frozen=True, slots=True)
class Bid:
    """Start ``job`` at ``seat``."""

    job: str
    seat: str
    worth: int
    """At least 1, in units of which `UNIT` are a run time saved by a job of weight 1."""
    load: Mapping[str, int] = field(default_factory=dict)
    """What it asks of each link of the seat, of which the link has `UNIT`."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A node with room."""

    name: str
    running: int = 0
    """Jobs that run there already."""
    load: Mapping[str, int] = field(default_factory=dict)
    """What they ask of each link."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The chosen bids among ``amounts`` (by position) may add up to ``most`` at most."""

    amounts: Mapping[int, int]
    most: int


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be chosen."""

    seats: tuple[Seat, ...]
    bids: tuple[Bid, ...]
    limits: tuple[Limit, ...]
    crowding: int = UNIT
    """What a job loses, in units of worth, when its node is asked for twice what it has."""

    def allowed(self, chosen: Iterable[int]) -> bool:
        """Whether these bids may be chosen together."""
        bids = set(chosen)
        return all(
            sum(amount for bid, amount in limit.amounts.items() if bid in bids) <= limit.most for limit in self.limits
        )

    def worth(self, chosen: Iterable[int]) -> int:
        """The objective, in units of worth over `UNIT`."""
        bids = list(chosen)
        gained = sum(self.bids[bid].worth for bid in bids) * UNIT
        return gained - sum(self.crowding * self.crowd(seat, bids) for seat in self.seats)

    def crowd(self, seat: Seat, chosen: Iterable[int]) -> int:
        """Jobs at the seat, times the part by which the fullest link is asked for more than it has, in `UNIT`."""
        here = [self.bids[bid] for bid in chosen if self.bids[bid].seat == seat.name]
        if not here:
            return 0
        return (seat.running + len(here)) * _excess(seat, here) - seat.running * _excess(seat, ())


def _excess(seat: Seat, bids: Sequence[Bid]) -> int:
    links = set(seat.load) | {link for bid in bids for link in bid.load}
    loads = [seat.load.get(link, 0) + sum(bid.load.get(link, 0) for bid in bids) for link in links]
    return max(0, max(loads, default=0) - UNIT)


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen bids, in ascending order."""

    bids: tuple[int, ...]
    status: Status
    objective: int
    effort: float = 0.0
    """Work that the solver did, by its own count."""


def choose(problem: Problem, *, seconds: float, effort: float = math.inf) -> Choice:
    """The best allowed bids; what is best so far, or what `greedy` finds, after ``seconds`` or so much ``effort``.

    One thread, a fixed seed and a limit on the solver's own count of work (about a second each) make the answer the
    same on every machine on which ``seconds`` is the wider limit.
    """
    if not problem.bids:
        return Choice((), "NOTHING", 0)
    rule = greedy(problem)
    fallback = Choice(rule, "FALLBACK", problem.worth(rule))
    if seconds <= 0 or effort <= 0:
        return fallback
    model, taken = _model(problem)
    for place, variable in enumerate(taken):
        model.add_hint(variable, place in rule)
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # it would leave the signal to end the process afterwards
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return replace(fallback, effort=solver.deterministic_time)
    bids = tuple(place for place, variable in enumerate(taken) if solver.boolean_value(variable))
    proven: Status = "OPTIMAL" if status == cp_model.OPTIMAL else "FEASIBLE"
    best = max(bids, rule, key=problem.worth)  # a hint that was not followed may have been better
    return Choice(best, proven, problem.worth(best), solver.deterministic_time)


def greedy(problem: Problem) -> tuple[int, ...]:
    """The bid that adds most, again and again, while one adds something."""
    chosen: list[int] = []
    left = [limit.most for limit in problem.limits]
    of_bid: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, limit in enumerate(problem.limits):
        for bid, amount in limit.amounts.items():
            of_bid[bid].append((number, amount))
    seats = {seat.name: seat for seat in problem.seats}
    by_worth = sorted(range(len(problem.bids)), key=lambda bid: (-problem.bids[bid].worth, bid))
    for bid in by_worth:
        if any(amount > left[number] for number, amount in of_bid[bid]):
            continue
        seat = seats[problem.bids[bid].seat]
        cost = problem.crowd(seat, [*chosen, bid]) - problem.crowd(seat, chosen)
        if problem.bids[bid].worth * UNIT > problem.crowding * cost:
            chosen.append(bid)
            for number, amount in of_bid[bid]:
                left[number] -= amount
    return tuple(sorted(chosen))


def _model(problem: Problem) -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
    model = cp_model.CpModel()
    taken = [model.new_bool_var(f"{bid.job}@{bid.seat}") for bid in problem.bids]
    for limit in problem.limits:
        model.add(sum(amount * taken[bid] for bid, amount in limit.amounts.items()) <= limit.most)
    at: dict[str, list[int]] = defaultdict(list)
    for place, bid in enumerate(problem.bids):
        at[bid.seat].append(place)
    costs = [_crowd(model, taken, problem, seat, at[seat.name]) for seat in problem.seats if at[seat.name]]
    gained = sum(bid.worth * UNIT * variable for bid, variable in zip(problem.bids, taken, strict=True))
    model.maximize(gained - problem.crowding * sum(cost for cost in costs if cost is not None))
    return model, taken


def _crowd(
    model: cp_model.CpModel, taken: Sequence[cp_model.IntVar], problem: Problem, seat: Seat, here: Sequence[int]
) -> cp_model.LinearExprT | None:
    """The variable that is at least `Problem.crowd` of the seat; None if its links cannot become too full."""
    most = _most_jobs(problem, here)
    links = sorted(set(seat.load) | {link for bid in here for link in problem.bids[bid].load})
    heaviest = {link: _heaviest(problem, seat, here, link, most) for link in links}
    top = max(heaviest.values(), default=0) - UNIT
    if top <= 0:
        return None
    excess = model.new_int_var(0, top, f"excess {seat.name}")
    for link in links:
        if heaviest[link] > UNIT:
            asked = sum(problem.bids[bid].load.get(link, 0) * taken[bid] for bid in here)
            model.add(excess >= seat.load.get(link, 0) + asked - UNIT)
    cost = model.new_int_var(0, (seat.running + most) * top, f"crowd {seat.name}")
    jobs = sum(taken[bid] for bid in here)
    for count in range(1, most + 1):
        at_least = model.new_bool_var(f"{seat.name} takes {count}")
        model.add(jobs >= count).only_enforce_if(at_least)
        model.add(jobs <= count - 1).only_enforce_if(~at_least)
        before = seat.running * _excess(seat, ())
        model.add(cost >= (seat.running + count) * excess - before).only_enforce_if(at_least)
    return cost


def _most_jobs(problem: Problem, here: Sequence[int]) -> int:
    """Most bids of a seat that its limits let through, by the limits that count every one of them alike."""
    places = set(here)
    jobs = len({problem.bids[bid].job for bid in here})
    counts = [
        limit.most for limit in problem.limits if set(limit.amounts) == places and set(limit.amounts.values()) == {1}
    ]
    return min([jobs, *counts])


def _heaviest(problem: Problem, seat: Seat, here: Sequence[int], link: str, most: int) -> int:
    loads = sorted((problem.bids[bid].load.get(link, 0) for bid in here), reverse=True)
    return seat.load.get(link, 0) + sum(loads[:most])
