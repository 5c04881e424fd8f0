"""A policy as how many layers do what, and where among equal layers those are put.

Equal layers are interchangeable, so a search over how many of them recompute, leave the GPU or keep internals is all
but a search over policies. Where they are put decides what traffic meets what compute: early copies have the most time,
late layers need no working memory while others hold theirs, evenly spread traffic waits least. `Layout` says which of
these counts, and the simulator decides between them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from ...jobs.model_facts import ModelFacts
from ...jobs.policy import LayerPolicy, Policy
from ...jobs.policy.artifact import Home
from ...jobs.policy.parked import parked_state_bytes
from .choices import Kept, Problem, sorts_of
from .search import Question

Key = tuple[int, Kept, Literal["gpu", "host"]]
"""Sort of layer, what is kept of it, and where."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the layers that do something are put among those that could."""

    kept_last: bool = True
    """Internals kept on the GPU are those of the last layers; otherwise spread evenly."""
    away_first: bool = True
    """Boundaries that leave the GPU are the first; otherwise spread evenly."""
    blocks_first: bool = True
    """Blocks that recompute come first; otherwise spread evenly."""


LAYOUTS: Final = tuple(Layout(k, a, b) for b in (True, False) for k in (True, False) for a in (True, False))


@dataclass(frozen=True)
class Counts:
    """How many layers do what."""

    blocks: dict[int, int] = field(default_factory=dict)
    """Number of blocks of 2, 3, ... layers; the other layers are blocks of their own."""
    away: int = 0
    """Boundaries on the host or on NVMe."""
    nvme: int = 0
    """Those of them on NVMe."""
    kept: dict[Key, int] = field(default_factory=dict)
    resident: int = 0
    parked: int = 0
    """Layers whose optimizer state and gradient are on NVMe: the last ones, whose updates come last."""
    weight_slots: int = 2
    staging_slots: int = 3
    layout: Layout = Layout()

    def change(self, **changes: object) -> Counts:
        """These counts with some replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]


def count(policy: Policy, facts: ModelFacts) -> Counts:
    """The counts of a policy."""
    sorts, homes = sorts_of(facts), policy.homes
    marks = [i for i, home in enumerate(homes) if home != "recompute"]
    lengths = Counter(end - start for start, end in itertools.pairwise(marks))
    kept = Counter(
        (sorts[x.index], x.internals, x.internals_home) for x in policy.layers if x.internals != "none"
    )  # fmt: skip
    return Counts(
        blocks={length: number for length, number in sorted(lengths.items()) if length > 1},
        away=homes.count("host") + homes.count("nvme"),
        nvme=homes.count("nvme"),
        kept={key: kept[key] for key in sorted(kept)},
        resident=sum(layer.resident for layer in policy.layers),
        parked=sum(layer.optimizer_home == "nvme" for layer in policy.layers),
        weight_slots=policy.weight_slots,
        staging_slots=policy.staging_slots,
    )


def place(counts: Counts, facts: ModelFacts, sorts: Sequence[int], accumulation: int = 1) -> Policy | None:
    """The policy with these counts, laid out as they say; None if there are not enough layers for them.

    ``sorts`` are those of the layers (`sorts_of`).
    """
    layers = len(facts.layers)
    starts = _starts(counts, layers)
    if starts is None or counts.away > len(starts) or counts.nvme > counts.away:
        return None
    leaving = _pick(sorted(starts), counts.away, first=counts.layout.away_first)
    homes: list[Home] = ["recompute"] * layers
    for start in starts:
        homes[start] = "gpu"
    for rank, start in enumerate(leaving):
        homes[start] = "nvme" if rank < counts.nvme else "host"
    kept = _place_kept(counts, sorts, [start for start, length in sorted(starts.items()) if length == 1])
    if kept is None:
        return None
    resident = set(_pick(list(range(layers)), min(counts.resident, layers), first=False))
    made = Policy.from_homes(facts, [*homes, "gpu"], accumulation=accumulation, weight_slots=counts.weight_slots)
    chosen = [
        LayerPolicy(index=i, internals=kept[i][0], internals_home=kept[i][1], resident=i in resident)
        if i in kept
        else LayerPolicy(index=i, resident=i in resident)
        for i in range(layers)
    ]
    placed = made.model_copy(update={"layers": tuple(chosen), "staging_slots": counts.staging_slots})
    last = [i for i in parkable(facts) if i >= layers - counts.parked]
    return placed.parked(optimizer=last, gradients=last) if last else placed


def parkable(facts: ModelFacts) -> list[int]:
    """Layers that have optimizer state of their own to put on NVMe."""
    own = ((i, layer) for i, layer in enumerate(facts.layers) if layer.gradient_bytes)
    return [i for i, layer in own if not layer.shares_weights_with]


def parked_sizes(asked: Question | Problem) -> list[int]:
    """Bytes of host memory that optimizer state and gradient of each of those layers give back."""
    facts = asked.facts
    wide = 4 / facts.element_bytes if asked.accumulation > 1 else 1  # sums are float32
    layers = [facts.layers[i] for i in parkable(facts)]
    return [
        parked_state_bytes(layer, facts, asked.optimizer) + round(wide * layer.gradient_bytes) for layer in layers
    ]


def _starts(counts: Counts, layers: int) -> dict[int, int] | None:
    """First layer and length of each block."""
    long = [length for length, number in sorted(counts.blocks.items(), reverse=True) for _ in range(number)]
    singles = layers - sum(long)
    if singles < 0:
        return None
    lengths = [*long, *[1] * singles]
    if not counts.layout.blocks_first and long:
        places = set(_pick(list(range(len(lengths))), len(long), first=False))
        left = iter(long)
        lengths = [next(left) if i in places else 1 for i in range(len(lengths))]
    starts, at = {}, 0
    for length in lengths:
        starts[at] = length
        at += length
    return starts


def _place_kept(
    counts: Counts, sorts: Sequence[int], free: list[int]
) -> dict[int, tuple[Kept, Literal["gpu", "host"]]] | None:
    placed: dict[int, tuple[Kept, Literal["gpu", "host"]]] = {}
    for home, last in (("gpu", counts.layout.kept_last), ("host", False)):
        for (sort, what, where), number in counts.kept.items():
            if where != home or not number:
                continue
            able = [i for i in free if sorts[i] == sort and i not in placed]
            if number > len(able):
                return None
            chosen = able[-number:] if last else _pick(able, number, first=False)
            placed |= dict.fromkeys(chosen, (what, where))
    return placed


def _pick(items: list[int], number: int, *, first: bool) -> list[int]:
    """``number`` of the items: the first, or evenly spread ones."""
    if first or not number:
        return items[:number]
    return [items[int((k + 0.5) * len(items) / number)] for k in range(number)]
