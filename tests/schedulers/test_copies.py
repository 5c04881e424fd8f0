"""What GPUs share, from what each reached alone and with all others."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lazytrain.schedulers.copies import CopyRates, shared_links

ALONE = {"h2d_bytes_s": 25.0, "d2h_bytes_s": 24.0}


def rates(gpu: str, root: str, *, together: float, both: float = 0.0, **changes: float) -> CopyRates:
    """A GPU that reaches 25 and 24 alone, and ``together`` in each direction while all copy."""
    fields: dict[str, Any] = {
        **ALONE,
        "both_h2d_bytes_s": 22.0,
        "both_d2h_bytes_s": 21.0,
        "all_h2d_bytes_s": together,
        "all_d2h_bytes_s": together,
        "all_both_h2d_bytes_s": both or together,
        "all_both_d2h_bytes_s": both or together,
    }
    return CopyRates(gpu=gpu, pcie_root=root, **(fields | changes))


def test_nothing_is_shared_as_far_as_is_known_but_a_root() -> None:
    links = shared_links([], **ALONE)
    assert (links.h2d_bytes_s, links.d2h_bytes_s, links.both_bytes_s) == (math.inf,) * 3
    assert links.root_bytes_s == 24.0


def test_memory_that_is_short_holds_all_of_them_back_and_no_root() -> None:
    links = shared_links([rates(str(i), str(i), together=10.0, both=6.0) for i in range(4)], **ALONE)
    assert (links.h2d_bytes_s, links.d2h_bytes_s, links.both_bytes_s) == (40.0, 40.0, 49.0)
    assert links.root_bytes_s == 24.0  # one at a time is as fast as ever


def test_a_root_gives_what_its_gpus_reach_together() -> None:
    shared = shared_links([rates("0", "a", together=12.5), rates("1", "a", together=12.5)], **ALONE)
    assert shared.root_bytes_s == 25.0
    apart = shared_links([rates("0", "", together=23.0), rates("1", "", together=23.0)], **ALONE)
    assert apart.root_bytes_s == 46.0  # the kernel names no root, and none holds them back


def test_never_less_than_the_plan_of_one_counts_on() -> None:
    """Its plan has 25 and 24 at the same time; that one GPU gives less in both directions is for that plan to know."""
    links = shared_links([rates("0", "a", together=25.0, both=15.0)], **ALONE)
    assert (links.h2d_bytes_s, links.both_bytes_s) == (25.0, 49.0)


def test_rates_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        rates("0", "", together=0.0)
