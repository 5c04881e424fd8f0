"""Planning problems: the published one of the 27B model, and small random ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.policy.artifact import Home
from lazytrain.schedulers.hardware import Budgets
from lazytrain.schedulers.planner import Instance, Link

GIB = 1 << 30


class Published:
    """The constants of the 27B run, and its schedule; ``window_forwards`` is the compute that a window offers."""

    def __init__(self) -> None:
        self.constants: dict[str, Any] = json.loads(Path(__file__).with_name("paper_27b.json").read_text())
        self.names: Sequence[str] = tuple(self.constants["budgets_gib"])

    def instance(self, budgets: str, window_forwards: float = 4.0) -> Instance:
        c = self.constants
        kinds = ["full" if i % 4 == 3 else "linear" for i in range(c["layers"])]
        forward_s = [c["forward_flops_per_token"][kind] * c["tokens"] / c["layer_flops_s"] for kind in kinds]
        weights = [2 * c["layer_parameters"][kind] for kind in kinds]
        host, nvme = c["budgets_gib"][budgets]

        def link(name: str, loads: int) -> Link:
            rate = c[f"{name}_bytes_s"]
            return Link(rate, tuple(window_forwards * s * rate for s in forward_s), tuple(loads * w for w in weights))

        tie = 1e-5 * sum(forward_s) / len(forward_s)
        return Instance(
            sizes=(c["boundary_bytes"],) * (c["layers"] + 1),
            forward_s=tuple(forward_s),
            budgets=Budgets(gpu_bytes=int(c["gpu_gib"] * GIB), host_bytes=host * GIB, nvme_bytes=nvme * GIB),
            d2h=link("d2h", 1),
            h2d=link("h2d", 2),
            nvme_write=link("nvme_write", 0),
            nvme_read=link("nvme_read", 0),
            longest_block=c["longest_block"],
            materialised_s=tie,
            nvme_s=tie,
        )

    @property
    def schedule(self) -> tuple[Home, ...]:
        homes: list[Home] = ["recompute"] * (self.constants["layers"] + 1)
        tiers: tuple[Home, ...] = ("gpu", "host", "nvme")
        for tier in tiers:
            for i in self.constants["published"][tier]:
                homes[i] = tier
        return tuple(homes)


def _random_instance(seed: int, layers: int, *, equal: bool = False, tight: float = 1.0) -> Instance:
    """Small whole numbers, so that ties and binding budgets are common."""
    draw = random.Random(seed)
    size = draw.randint(1, 5)
    sizes = tuple(size if equal else draw.randint(1, 5) for _ in range(layers + 1))
    total = sum(sizes)

    def link() -> Link:
        capacity = tuple(draw.choice([0.0, 1.0, 2.5, 6.0]) for _ in range(layers))
        return Link(draw.choice([1.0, 2.0, 8.0]), capacity, tuple(draw.choice([0.0, 1.0, 3.0]) for _ in range(layers)))

    return Instance(
        sizes=sizes,
        forward_s=tuple(draw.choice([0.25, 1.0, 2.0, 3.5]) for _ in range(layers)),
        budgets=Budgets(
            gpu_bytes=sizes[0] + sizes[-1] + draw.randint(0, round(total * tight / 2)),
            host_bytes=draw.randint(0, round(total * tight / 3)),
            nvme_bytes=draw.randint(0, round(total * tight / 3)),
        ),
        d2h=link(),
        h2d=link(),
        nvme_write=link(),
        nvme_read=link(),
        longest_block=draw.randint(1, layers),
        materialised_s=draw.choice([0.0, 1e-4]),
        nvme_s=draw.choice([0.0, 1e-4]),
    )


@pytest.fixture(scope="session")
def published() -> Published:
    return Published()


@pytest.fixture(scope="session")
def random_instance() -> Callable[..., Instance]:
    return _random_instance
