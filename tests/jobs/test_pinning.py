from __future__ import annotations

import pytest

from lazytrain.jobs.pinning import LARGEST_SLAB, SLABS, SMALLEST_SLAB, Pinning, decide_pinning

MIB = 2**20


@pytest.mark.parametrize("limit", [None, 500 * MIB, 501 * MIB])
def test_what_the_limit_allows_is_pinned_in_place(limit):
    assert decide_pinning(500 * MIB, limit) == Pinning(500 * MIB)


@pytest.mark.parametrize(
    ("limit", "in_place", "slab"),
    [
        (1000 * MIB, 808 * MIB, 32 * MIB),
        (384 * MIB, 192 * MIB, 32 * MIB),
        (383 * MIB, 287 * MIB, 16 * MIB),
        (12 * MIB, 6 * MIB, 1 * MIB),
    ],
)
def test_beyond_the_limit_traffic_passes_through_slabs(limit, in_place, slab):
    choice = decide_pinning(2000 * MIB, limit)
    assert choice == Pinning(in_place, SLABS, slab)
    assert choice.in_place_bytes + choice.ring_bytes == limit


@pytest.mark.parametrize("limit", [0, 65536, 12 * MIB - 1])
def test_where_not_even_slabs_fit_nothing_is_pinned(limit):
    assert decide_pinning(2000 * MIB, limit) == Pinning(0)


def test_the_limit_is_never_passed():
    for limit in range(0, 900 * MIB, 7 * MIB + 123):
        for wanted in (MIB, 100 * MIB, 3000 * MIB):
            choice = decide_pinning(wanted, limit)
            assert choice.in_place_bytes + choice.ring_bytes <= max(limit, 0)
            assert choice.slab_bytes in {0, *(LARGEST_SLAB >> k for k in range(6))}
            assert choice.slabs == 0 or choice.slab_bytes >= SMALLEST_SLAB
