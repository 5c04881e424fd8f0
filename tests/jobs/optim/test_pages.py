"""Masters and states take the memory that they have, and large pages where there are some."""

import mmap
import sys
from pathlib import Path

import pytest
import torch

from lazytrain.jobs.layout import Layout
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.optim.pages import zeros


def flags(address: int) -> list[str]:
    """Of the memory mapping that holds the address, as Linux tells them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(part, 16) for part in words[0].split("-"))
            inside = start <= address < end
        elif inside and words[0] == "VmFlags:":
            return words[1:]
    return []


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [0, 5, (1 << 23) + 1])
def test_zeros(numel: int, dtype: torch.dtype) -> None:
    tensor = zeros(numel, dtype)
    assert (tensor.shape, tensor.dtype) == ((numel,), dtype)
    assert not tensor.any()
    assert bool((tensor.add_(1) == 1).all())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_goes_back_when_the_tensor_does() -> None:
    """Also between others that stay: here every second of sixteen is let go."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    size, before = 1 << 24, resident()
    made = [zeros(size, torch.uint8).fill_(1) for _ in range(16)]
    assert resident() - before > 15 * size
    del made[::2]
    assert resident() - before < 9 * size


def test_more_than_there_is() -> None:
    with pytest.raises(MemoryError, match="bytes of host memory"):
        zeros(1 << 60, torch.uint8)


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for on Linux")
def test_masters_and_states_of_large_units_lie_in_large_pages() -> None:
    unit = HybridAdamW().unit(Layout.of({"w": (4096, 4096)}), torch.zeros(1 << 24), torch.bfloat16)
    large = [tensor for tensor in unit.state().values() if tensor.nbytes >= 1 << 23]
    assert len(large) == 4
    for tensor in large:
        assert "hg" in flags(tensor.data_ptr() + tensor.nbytes // 2)
