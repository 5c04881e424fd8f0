"""Pinned memory against a driver that counts, and the ring of slabs against copies that happen late."""

from __future__ import annotations

import gc

import pytest
import torch

from lazytrain.jobs.executor.devices.host import PAGE
from lazytrain.jobs.executor.devices.pinned import PinnedMemory, SlabRing, make_ring

MIB = 2**20


class FakeDriver:
    """Registers up to ``limit`` bytes; refuses what overlaps or is not a page's start, as the real one may."""

    def __init__(self, limit=None):
        self.limit, self.held, self.settled = limit, {}, 0

    def register(self, address, nbytes):
        assert address % PAGE == nbytes % PAGE == 0
        assert all(address + nbytes <= a or a + n <= address for a, n in self.held.items())
        if self.limit is not None and sum(self.held.values()) + nbytes > self.limit:
            return 2
        self.held[address] = nbytes
        return 0

    def unregister(self, address):
        del self.held[address]
        return 0

    def settle(self):
        self.settled += 1


def test_exactly_what_was_asked_for_is_pinned_and_unpinned_when_nobody_holds_it():
    driver = FakeDriver()
    memory = PinnedMemory(driver)
    tensor = memory.allocate(129 * MIB + 5)  # a pinned allocator that rounds would take 256 MiB
    assert sum(driver.held.values()) == memory.pinned_bytes == 129 * MIB + PAGE
    view = tensor.view(torch.uint8)[100:200]
    assert memory.is_pinned(view)
    del tensor
    gc.collect()
    assert memory.is_pinned(view)
    del view
    gc.collect()
    assert driver.held == {}


def test_closing_unpins_all_and_leaves_the_memory():
    driver = FakeDriver()
    memory = PinnedMemory(driver)
    tensors = [memory.allocate(PAGE) for _ in range(3)]
    memory.close()
    assert (driver.held, driver.settled) == ({}, 1)
    assert not any(memory.is_pinned(tensor) for tensor in tensors)
    tensors[0].fill_(1)
    del tensors  # and unpins nothing twice


@pytest.mark.parametrize("by", ["driver", "limit"])
def test_where_pinning_ends_the_newest_pins_make_room_for_slabs(by, caplog):
    driver = FakeDriver(limit=100 * MIB if by == "driver" else None)
    memory = PinnedMemory(driver, limit_bytes=100 * MIB if by == "limit" else None)
    tensors = [memory.allocate(10 * MIB) for _ in range(14)]
    pinned = [memory.is_pinned(tensor) for tensor in tensors]
    assert pinned == [True] * 5 + [False] * 9  # two rings of three slabs of 8 MiB take 48 of the 100
    assert "only 100MiB of host memory can be pinned" in caplog.text.replace(" MiB", "MiB").replace("100.0", "100")
    assert "ulimit -l" in caplog.text
    assert len(caplog.records) == 1
    rings = [make_ring(memory, torch.Tensor.copy_, Deferred().mark) for _ in range(2)]
    assert all(ring is not None for ring in rings)
    assert sum(driver.held.values()) == 50 * MIB + 48 * MIB
    assert all(slab.nbytes == 8 * MIB for ring in rings for slab in ring._slabs)


def test_where_nothing_can_be_pinned_there_is_no_ring(caplog):
    memory = PinnedMemory(FakeDriver(limit=0))
    tensor = memory.allocate(MIB)
    tensor.fill_(3)
    assert not memory.is_pinned(tensor)
    assert make_ring(memory, torch.Tensor.copy_, Deferred().mark) is None
    assert "the driver" in caplog.text


class Deferred:
    """A stream whose copies happen only when somebody waits for them."""

    def __init__(self):
        self.waiting = []
        self.most = 0

    def copy(self, target, source):
        self.waiting.append((target, source))
        self.most = max(self.most, len(self.waiting))

    def mark(self):
        stream = self

        class Mark:
            def record(self):
                self.upto = len(stream.waiting) and stream.waiting[-1]

            def synchronize(self):
                while any(pair is self.upto for pair in stream.waiting):
                    target, source = stream.waiting.pop(0)
                    target.copy_(source)

        return Mark()

    def finish(self):
        for target, source in self.waiting:
            target.copy_(source)
        self.waiting.clear()


@pytest.fixture
def late():
    return Deferred()


@pytest.fixture
def ring(late):
    return SlabRing([torch.empty(400, dtype=torch.uint8) for _ in range(3)], late.copy, late.mark)


@pytest.mark.parametrize("numel", [1, 100, 101, 299, 300, 1050])
def test_copies_through_slabs_are_whole_both_ways(ring, late, numel):
    for seed in range(3):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        target, back = torch.full((numel,), float("nan")), torch.full((numel,), float("nan"))
        ring.to_device(target, values)
        late.finish()  # what the stream does in its own time
        assert torch.equal(target, values)
        ring.to_host(back, target)
        assert torch.equal(back, values)


def test_copies_of_a_long_tensor_overlap(ring, late):
    ring.to_host(torch.empty(1000), torch.randn(1000))
    assert late.most == 3  # as many are under way as there are slabs


def test_the_host_may_keep_another_dtype_and_the_source_any_strides(ring):
    source = torch.randn(30, 40).bfloat16().t()
    target = torch.empty(40, 30)
    ring.to_host(target, source)
    assert torch.equal(target, source.float())
