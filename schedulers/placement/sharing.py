"""How fast jobs run side by side on one node.

A job that reaches a share s of its speed uses s times its demand of every link. All jobs of a node are sped up together
until a link is full; those that use it stay at that speed and the others go on, until they reach their own speed
(max-min fairness by progressive filling: Bertsekas and Gallager, Data Networks, 6.5.2).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from .question import NodeState, Option

Link: TypeAlias = "tuple[str, str]"
"""What can be short: its name, and the PCIe root for links that every root has (else empty)."""
ALL_H2D: Final[Link] = ("all_h2d", "")
"""All copies to GPUs of the node, those from them, and both: its memory and its PCIe roots give so much at once."""
ALL_D2H: Final[Link] = ("all_d2h", "")
COPIES: Final[Link] = ("copies", "")
_FULL = 1e-9


def speeds(jobs: Sequence[tuple[Option, str]], node: NodeState) -> list[float]:
    """Share of its own speed, in (0, 1], that each job reaches when all of them run on ``node``.

    A job is its option and the PCIe root of its GPU.
    """
    demands = [demands_of(option, root) for option, root in jobs]
    return progressive_filling(demands, capacities(node, (root for _, root in jobs)))


def demands_of(option: Option, root: str) -> dict[Link, float]:
    """What a job uses of each link at full speed, bytes per second."""
    return {
        ("dram", ""): option.dram_bytes_s,
        ("h2d", root): option.h2d_bytes_s,
        ("d2h", root): option.d2h_bytes_s,
        ALL_H2D: option.h2d_bytes_s,
        ALL_D2H: option.d2h_bytes_s,
        COPIES: option.h2d_bytes_s + option.d2h_bytes_s,
        ("nvme_read", ""): option.nvme_read_bytes_s,
        ("nvme_write", ""): option.nvme_write_bytes_s,
    }


def capacities(node: NodeState, roots: Iterable[str]) -> dict[Link, float]:
    """Bandwidth of each link of ``node``, bytes per second; infinite where it never runs short."""
    shared: dict[Link, float] = {
        ("dram", ""): node.dram_bytes_s,
        ALL_H2D: node.h2d_bytes_s,
        ALL_D2H: node.d2h_bytes_s,
        COPIES: node.copies_bytes_s,
        ("nvme_read", ""): node.nvme_read_bytes_s,
        ("nvme_write", ""): node.nvme_write_bytes_s,
    }
    return shared | {(name, root): node.pcie_bytes_s for root in roots for name in ("h2d", "d2h")}


def progressive_filling(demands: Sequence[Mapping[Link, float]], capacity: Mapping[Link, float]) -> list[float]:
    """The max-min fair share of its demands that each job gets, at most 1."""
    done: dict[int, float] = {}
    while len(done) < len(demands):
        wanted: dict[Link, float] = defaultdict(float)
        used: dict[Link, float] = defaultdict(float)
        for job, demand in enumerate(demands):
            for link, rate in demand.items():
                used[link] += rate * done.get(job, 0.0)
                wanted[link] += 0.0 if job in done else rate
        levels = {link: (capacity[link] - used[link]) / rate for link, rate in wanted.items() if rate > 0}
        level = min(1.0, min(levels.values(), default=math.inf))
        full = {link for link, at in levels.items() if at <= level * (1 + _FULL)}
        open_jobs = [job for job in range(len(demands)) if job not in done]
        for job in open_jobs:
            if level >= 1.0 or any(demands[job].get(link, 0.0) > 0 for link in full):
                done[job] = max(level, _FULL)
    return [done[job] for job in range(len(demands))]
