from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from lazytrain.jobs.layout import ALIGNMENT, Layout

shapes = st.dictionaries(st.text("abc.", min_size=1), st.lists(st.integers(0, 300), max_size=3).map(tuple), max_size=6)


@given(shapes)
def test_segments_are_aligned_disjoint_and_cover_their_parameters(shapes):
    layout, end = Layout.of(shapes), 0
    for segment, (name, shape) in zip(layout.segments, shapes.items(), strict=True):
        assert (segment.name, segment.shape, segment.numel) == (name, shape, math.prod(shape))
        assert segment.offset == end
        assert segment.offset % ALIGNMENT == 0
        assert segment.offset + segment.numel <= segment.end < segment.offset + segment.numel + ALIGNMENT
        end = segment.end
    assert layout.numel == end


def test_sizes_beyond_32_bits_are_exact():
    layout = Layout.of({"a": (2**31 + 5,), "b": (2**33,)})
    assert layout.segments[1].offset == 2**31 + 64
    assert layout.numel == 2**31 + 64 + 2**33
