"""Memory of one's own, side by side with others and yet apart in the processor's caches."""

import itertools
import mmap

import numpy as np
import pytest

from lazytrain.jobs.mapped import PLACES, mapped


def address(memory: mmap.mmap, begin: int) -> int:
    return int(np.frombuffer(memory, np.uint8, offset=begin).ctypes.data)


def test_it_is_all_there_from_a_page_on() -> None:
    memory, begin = mapped(5)
    assert begin % mmap.PAGESIZE == 0
    assert memory[begin : begin + 5] == bytes(5)
    memory[begin : begin + 5] = b"12345"


def test_no_two_of_an_updates_arrays_are_a_power_of_two_apart() -> None:
    """Wherever the system puts them."""
    pages = [address(*mapped(size)) // mmap.PAGESIZE for size in (1 << 24, 1 << 24, 1 << 25, 4096, 5, 1 << 24)]
    assert [(later - page) % PLACES for page, later in itertools.pairwise(pages)] == [1] * 5


def test_more_than_there_is() -> None:
    with pytest.raises(MemoryError, match="tried to allocate"):
        mapped(1 << 60)
