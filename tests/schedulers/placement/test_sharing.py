"""Jobs side by side: nobody passes a link, nobody is slowed without need."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazytrain.schedulers.placement.sharing import progressive_filling, speeds

LINKS = ("dram", "h2d", "d2h")
DEMANDS = st.lists(
    st.fixed_dictionaries({(link, ""): st.floats(0, 10).map(lambda rate: round(rate, 3)) for link in LINKS}),
    min_size=1,
    max_size=6,
)


def test_memory_is_shared_by_the_node_and_pcie_by_the_root(make: Any) -> None:
    node = make.node("a", gpus=4, dram_bytes_s=100.0, pcie_bytes_s=30.0)
    heavy = make.option(h2d_bytes_s=20.0, dram_bytes_s=20.0)
    assert speeds([(heavy, "0"), (heavy, "0")], node) == pytest.approx([0.75, 0.75])
    assert speeds([(heavy, "0"), (heavy, "1")], node) == pytest.approx([1.0, 1.0])
    hungry = make.option(dram_bytes_s=100.0)
    assert speeds([(hungry, "0"), (hungry, "1")], node) == pytest.approx([0.5, 0.5])


def test_copies_of_all_gpus_share_what_was_measured_while_all_copied(make: Any) -> None:
    node = make.node("a", gpus=2, pcie_bytes_s=30.0, h2d_bytes_s=40.0, d2h_bytes_s=40.0, copies_bytes_s=50.0)
    loads, stores = make.option(h2d_bytes_s=30.0), make.option(d2h_bytes_s=30.0)
    assert speeds([(loads, "0")], node) == [1.0]
    assert speeds([(loads, "0"), (loads, "1")], node) == pytest.approx([2 / 3, 2 / 3])
    assert speeds([(loads, "0"), (stores, "1")], node) == pytest.approx([5 / 6, 5 / 6])


def test_a_job_that_uses_no_full_link_keeps_its_speed(make: Any) -> None:
    node = make.node("a", gpus=3, pcie_bytes_s=10.0)
    pair, other = make.option(h2d_bytes_s=10.0), make.option(d2h_bytes_s=10.0)
    assert speeds([(pair, "0"), (pair, "0"), (other, "0")], node) == pytest.approx([0.5, 0.5, 1.0])


@given(DEMANDS, st.floats(1, 20))
def test_no_link_is_passed_and_every_slow_job_uses_a_full_one(
    demands: list[dict[tuple[str, str], float]], bandwidth: float
) -> None:
    capacity = {(link, ""): bandwidth for link in LINKS}
    reached = progressive_filling(demands, capacity)
    used = {link: sum(d[link] * s for d, s in zip(demands, reached, strict=True)) for link in capacity}
    assert all(0 < speed <= 1 for speed in reached)
    assert all(amount <= bandwidth * (1 + 1e-6) + 1e-6 for amount in used.values())
    for demand, speed in zip(demands, reached, strict=True):
        full = [link for link in capacity if demand[link] > 0 and used[link] >= bandwidth * (1 - 1e-6)]
        assert speed == 1 or full


@given(DEMANDS, st.floats(1, 20))
def test_one_more_job_never_lifts_the_slowest(demands: list[dict[tuple[str, str], float]], bandwidth: float) -> None:
    capacity = {(link, ""): bandwidth for link in LINKS}
    without = progressive_filling(demands[:-1], capacity)
    assert min(progressive_filling(demands, capacity)) <= min(without, default=1.0) + 1e-6
