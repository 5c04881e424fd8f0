"""The cut of a unit: which tensors are 8-bit, and chunks that cover everything once, far beyond 32-bit sizes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazytrain.jobs.layout import Layout
from lazytrain.jobs.optim.blocks import blocks, chunks, cut

SHAPES = {
    "q.weight": (128, 64),
    "q.bias": (8192,),
    "small.weight": (8, 16),
    "up.weight": (64, 65),
    "norm.weight": (64,),
    "temperature": (),
    "conv.weight": (4, 32, 32),
}


def test_8bit_and_decay_follow_size_and_dimensions() -> None:
    parts = cut(Layout.of(SHAPES), state_bits=8, block_size=256, min_8bit_size=4096)
    assert [p.segment.name for p in parts if p.quantised] == ["q.weight", "up.weight", "conv.weight"]
    assert [p.segment.name for p in parts if p.decayed] == ["q.weight", "small.weight", "up.weight", "conv.weight"]


def test_min_size_moves_exactly_the_expected_tensors() -> None:
    def quantised(**changes: int) -> set[str]:
        options = {"state_bits": 8, "block_size": 256, "min_8bit_size": 4096} | changes
        return {p.segment.name for p in cut(Layout.of(SHAPES), **options) if p.quantised}

    assert quantised() - quantised(min_8bit_size=4097) == {"conv.weight"}
    assert quantised(min_8bit_size=1) - quantised() == {"small.weight"}
    assert quantised(state_bits=32) == set()


def test_states_lie_side_by_side() -> None:
    parts = cut(Layout.of(SHAPES), state_bits=8, block_size=256, min_8bit_size=4096)
    small = [p for p in parts if p.quantised]
    assert [p.state_offset for p in small] == [0, 8192, 8192 + 4160]
    assert [p.scale_offset for p in small] == [0, 32, 32 + 17]
    assert [p.state_offset for p in parts if not p.quantised] == [0, 8192, 8192 + 128, 8192 + 128 + 64]


@given(st.integers(0, 5000), st.integers(1, 300), st.integers(1, 1000))
def test_chunks_cover_each_index_once(numel: int, block_size: int, limit: int) -> None:
    ranges = list(chunks(numel, block_size, limit))
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(numel))
    for start, stop in ranges:
        assert start % block_size == 0
        assert (stop - start) % block_size == 0 or (stop == numel and stop - start < block_size)
        assert stop - start <= max(limit, block_size)


@pytest.mark.parametrize("numel", [2**31 + 5, 2**33])
def test_sizes_beyond_32_bits(numel: int) -> None:
    limit = 2**24
    ranges = list(chunks(numel, 256, limit))
    assert ranges[0][0] == 0
    assert ranges[-1][1] == numel
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(ranges))
    assert blocks(numel, 256) == -(-numel // 256)
    last = ranges[-1]
    assert last[1] - last[0] == (numel % 256 or limit)
    parts = cut(Layout.of({"a": (numel, 1), "b": (numel, 1)}), state_bits=8, block_size=256, min_8bit_size=4096)
    assert parts[1].state_offset == numel
    assert parts[1].scale_offset == blocks(numel, 256)
    assert parts[1].segment.offset >= numel
