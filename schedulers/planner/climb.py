"""Local search over `Counts` with the simulator as judge: what is kept has been lowered, timed and fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import ceil
from typing import Final

from ...jobs.policy import Policy, lower
from ..baselines import shortages
from ..simulator import step_seconds
from .choices import INTERNALS_HOMES, KEPT, Kept, sorts_of
from .counts import LAYOUTS, Counts, Key, parked_sizes, place
from .floor import Floor
from .search import Question

REPAIRS: Final = 4
"""How often counts that do not fit are changed to fit before they are given up."""
STRIDES: Final = (1, 3, 8)
BETTER: Final = 1e-5
"""Share of the step time by which a change must help to be taken."""
SLOTS: Final = tuple((weights, staging) for staging in (3, 2, 1) for weights in (2, 3, 4))


@dataclass
class Climb:
    """The best policy so far, and how many were simulated."""

    question: Question
    step_s: float = float("inf")
    policy: Policy | None = None
    counts: Counts | None = None
    simulated: int = 0
    until_s: float = 0.0
    """A step time that is good enough."""
    tried: set[str] = field(default_factory=set)

    @cached_property
    def floor(self) -> Floor:
        """What is known of counts without simulating them."""
        return Floor.of(self.question)

    @cached_property
    def sorts(self) -> tuple[int, ...]:
        """Which layers are interchangeable."""
        return sorts_of(self.question.facts)

    def offer(self, policy: Policy) -> dict[str, int] | None:
        """Take a policy if it is faster than the best and fits; what it is short of if only memory is in its way."""
        question = self.question
        policy = question.own(policy)
        program = lower(policy, question.facts)
        self.simulated += 1
        step_s = step_seconds(program, question.facts, question.profile)
        if step_s >= self.step_s * (1 - BETTER):
            return None
        short = {
            s["resource"]: s["shortfall_bytes"] for s in shortages(policy, question.facts, question.budgets, program)
        }
        if not short:
            self.step_s, self.policy = step_s, policy
        return short

    def try_counts(self, counts: Counts | None) -> bool:
        """Take the counts, changed until they fit, if that is faster than the best."""
        for _ in range(REPAIRS):
            if counts is None or repr(counts) in self.tried:
                return False
            self.tried.add(repr(counts))
            if self.floor.seconds(counts) >= self.step_s:
                return False
            missing = self.floor.missing_bytes(counts)
            if missing > 0:
                counts = self._repaired(counts, {"gpu_memory": missing})
                continue
            policy = place(counts, self.question.facts, self.sorts, self.question.accumulation)
            short = self.offer(policy) if policy is not None else None
            if short is None:
                return False
            if not short:
                self.counts = counts
                return True
            counts = self._repaired(counts, short)
        return False

    def _repaired(self, counts: Counts, short: dict[str, int]) -> Counts | None:
        """Fewer bytes where they are short: boundaries move one tier down."""
        size, question = max(self.question.facts.boundary_bytes), self.question
        if "nvme" in short:
            return None
        if "gpu_memory" in short:
            more = ceil(short["gpu_memory"] / size)
            return counts.change(away=counts.away + more)
        more = ceil(short["host_memory"] / size)
        each = min(parked_sizes(question), default=0) if question.budgets.nvme_bytes else 0
        if each and counts.parked < len(question.facts.layers) and (counts.parked or counts.away < more):
            parked = counts.parked + ceil(short["host_memory"] / each)
            return counts.change(parked=min(parked, len(question.facts.layers)))
        if question.budgets.nvme_bytes and counts.nvme + more <= counts.away:
            return counts.change(nvme=counts.nvme + more)
        return counts.change(away=counts.away - more) if more <= counts.away - counts.nvme else None

    def improve(self, *, most: int, seconds_left: Callable[[], float]) -> None:
        """Change the best counts until nothing helps, the step is fast enough, or ``most`` were simulated.

        A change that helped is made again; the search ends after a round in which none did.
        """
        moves = list(self._moves())
        idle = at = 0
        while self.counts is not None and idle < len(moves):
            if self.step_s <= self.until_s or self.simulated >= most or seconds_left() <= 0:
                return
            if self.try_counts(moves[at](self.counts)):
                idle = 0
            else:
                idle, at = idle + 1, (at + 1) % len(moves)

    def take(self, other: Climb) -> None:
        """The better of the two policies."""
        self.simulated = other.simulated
        if other.policy is not None and other.step_s < self.step_s:
            self.step_s, self.policy, self.counts = other.step_s, other.policy, other.counts

    # ---- changes

    def _moves(self) -> Iterator[Move]:
        for layout in LAYOUTS:
            yield partial(Counts.change, layout=layout)
        yield from self._trades()
        for weights, staging in SLOTS:
            yield partial(Counts.change, weight_slots=weights, staging_slots=staging)
        for length in range(2, self.question.longest_block + 1):
            yield partial(_add_blocks, changes={length: 1})
            yield partial(_add_blocks, changes={length: -1})
            if length > 2:
                yield partial(_add_blocks, changes={length: -1, length - 1: 1})
        names = ("away", "resident", *(("nvme", "parked") if self.question.budgets.nvme_bytes else ()))
        for name in names:
            for stride in STRIDES:
                yield partial(_add_to, name=name, change=stride)
                yield partial(_add_to, name=name, change=-stride)

    def _trades(self) -> Iterator[Move]:
        """Layers more or fewer that keep something, or that keep something else of about as many bytes."""
        facts = self.question.facts
        size = {
            (sort, kept): layer.kept_bytes(kept)
            for sort, layer in zip(self.sorts, facts.layers, strict=True)
            for kept in KEPT
        }
        keys: list[Key] = [(*pair, home) for pair in size for home in INTERNALS_HOMES if size[pair]]
        for stride in reversed(STRIDES):
            for key in keys:
                yield partial(_keep, changes={key: stride})
                yield partial(_keep, changes={key: -stride})
        for taken in keys:
            for given in keys:
                if taken == given:
                    continue
                ratio = size[taken[:2]] / size[given[:2]]
                for number in dict.fromkeys((1, round(1 / ratio) or 1)):
                    yield partial(_keep, changes={taken: -number, given: max(1, round(number * ratio))})
        yield from self._exchanges(keys, size)

    def _exchanges(self, keys: list[Key], size: dict[tuple[int, Kept], int]) -> Iterator[Move]:
        """More layers that keep less on the GPU, and as many fewer that swap."""
        for rich, poor, swapped in itertools.product(keys, keys, keys):
            ratio = size[rich[:2]] / size[poor[:2]]
            if rich[0] == poor[0] == swapped[0] and rich[2] == poor[2] == "gpu" != swapped[2] and ratio > 1:
                for number in (1, 3, 6):
                    more = round(number * ratio)
                    changes = {rich: -number, poor: more, swapped: number - more}
                    yield partial(_keep, changes=changes)
                    yield partial(_keep, changes={key: -n for key, n in changes.items()})


Move = Callable[[Counts], "Counts | None"]


def _keep(counts: Counts, *, changes: dict[Key, int]) -> Counts | None:
    kept = {key: counts.kept.get(key, 0) + changes.get(key, 0) for key in sorted({*counts.kept, *changes})}
    return None if min(kept.values()) < 0 else counts.change(kept={key: n for key, n in kept.items() if n})


def _add_blocks(counts: Counts, *, changes: dict[int, int]) -> Counts | None:
    blocks = {length: counts.blocks.get(length, 0) + changes.get(length, 0) for length in {*counts.blocks, *changes}}
    return (
        None if min(blocks.values()) < 0 else counts.change(blocks={k: blocks[k] for k in sorted(blocks) if blocks[k]})
    )


def _add_to(counts: Counts, *, name: str, change: int) -> Counts | None:
    number = getattr(counts, name) + change
    return None if number < 0 else counts.change(**{name: number})
