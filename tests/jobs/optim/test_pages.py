"""Large pages are asked for, and change nothing else."""

import sys
from pathlib import Path

import pytest
import torch

from lazytrain.jobs.layout import Layout
from lazytrain.jobs.optim import HybridAdamW
from lazytrain.jobs.optim.pages import in_large_pages


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


@pytest.mark.parametrize("numel", [0, 5, 1 << 22])
def test_the_tensor_is_the_same(numel: int) -> None:
    tensor = torch.zeros(numel)
    assert in_large_pages(tensor) is tensor
    assert not tensor.any()


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for on Linux")
def test_masters_and_states_of_large_units_lie_in_large_pages() -> None:
    unit = HybridAdamW().unit(Layout.of({"w": (4096, 4096)}), torch.zeros(1 << 24), torch.bfloat16)
    large = [tensor for tensor in unit.state().values() if tensor.nbytes >= 1 << 23]
    assert len(large) == 4
    for tensor in large:
        assert "hg" in flags(tensor.data_ptr() + tensor.nbytes // 2)
