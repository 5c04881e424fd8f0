"""The CPU as a GPU: its memory is taken and given back as a GPU's is."""

from __future__ import annotations

import threading

import pytest
import torch

from lazytrain.jobs.errors import OutOfMemory
from lazytrain.jobs.executor.devices import Emulated, EmulatedDevice


@pytest.fixture
def device():
    opened = EmulatedDevice(Emulated(memory_bytes=1000, host_memory_bytes=3 * 4096))
    yield opened
    opened.close()


def test_what_a_copy_reads_is_in_use_until_compute_waits_for_it(device):
    """Whether the link was fast makes no difference: the host of a GPU does not know that a copy has ended."""
    with device.counting():
        source = torch.zeros(200)
    device.lend(source, "d2h")
    copied = device.streams["d2h"].submit("copy", lambda: None, ())
    later = device.streams["d2h"].submit("other", lambda: None, ())
    del source
    later.wait()
    assert device._tracker.live_bytes == 800
    with device.counting(), pytest.raises(OutOfMemory):
        torch.zeros(100)
    device.compute_waits(copied)
    assert device._tracker.live_bytes == 0


def test_a_wait_for_what_came_after_a_copy_on_another_stream_frees_its_source_too(device):
    with device.counting():
        source = torch.zeros(200)
    device.lend(source, "d2h")
    gradient = device.streams["d2h"].submit("gradient", lambda: None, ())
    device.streams["cpu"].submit("norm", lambda: None, (gradient,))
    clip = device.streams["cpu"].submit("clip", lambda: None, ())
    del source, gradient
    clip.wait()
    assert device._tracker.live_bytes == 800
    clip.settle()
    assert device._tracker.live_bytes == 0


def test_closing_gives_back_what_nobody_waited_for(device):
    with device.counting():
        source = torch.zeros(200)
    device.lend(source, "d2h")
    begun = threading.Event()
    device.streams["d2h"].submit("copy", begun.set, ())
    del source
    begun.wait()
    device.streams["d2h"].close()
    assert device._tracker.live_bytes == 0


def test_host_memory_counts_as_long_as_it_is_held(device):
    first = device.host_empty(1024, torch.float32)
    second = device.adopt(torch.zeros(2048))
    with pytest.raises(OutOfMemory) as caught:
        device.host_empty(1, torch.uint8)
    assert (caught.value.tier, caught.value.used_bytes) == ("host", 3 * 4096)
    del first
    assert device.host_empty(4096, torch.uint8).numel() == 4096
    assert second.numel() == 2048
