import resource

import pytest
import torch

from lazytrain.jobs.executor.devices.pinned import PinnedMemory
from lazytrain.platform.probe import HostMemory, Instruments, machine, measure
from lazytrain.platform.probe.pinning import can_pin, limit_that_holds
from lazytrain.schedulers.hardware import Budgets

MIB, GIB = 2**20, 2**30
HOST = HostMemory(64 * GIB, 14 * GIB, "cgroup v2")


class Driver:
    """Pins up to a limit, and knows what it holds."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.held, self.settled = limit_bytes, dict[int, int](), 0

    def register(self, address: int, nbytes: int) -> int:
        if sum(self.held.values()) + nbytes > self.limit_bytes:
            return 2
        self.held[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        del self.held[address]
        return 0

    def settle(self) -> None:
        self.settled += 1


@pytest.mark.parametrize(
    ("soft", "driver_limit", "holds"),
    [
        (resource.RLIM_INFINITY, 0, None),
        (50 * GIB, 0, None),  # all that is free
        (8 * MIB, 8 * MIB, 8 * MIB),
        (8 * MIB, 64 * GIB, None),  # the driver is not held to it
        (20 * GIB, 64 * GIB, 20 * GIB),  # too much to try
    ],
)
def test_the_memory_lock_limit_counts_where_it_keeps_the_driver_from_pinning(
    soft: int, driver_limit: int, holds: int | None
) -> None:
    driver = Driver(driver_limit)
    assert limit_that_holds(soft, HOST, lambda nbytes: can_pin(nbytes, driver)) == holds
    assert not driver.held
    assert driver.settled == (holds == 8 * MIB)  # a refusal leaves an error behind


def test_a_measured_gpu_has_the_limit_in_its_profile_and_a_plan_leaves_room_for_the_slabs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, answer in (("is_available", True), ("current_device", 0), ("get_device_name", "NVIDIA H200")):
        monkeypatch.setattr(machine.torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(machine.torch.cuda, "mem_get_info", lambda device: (100 * GIB, 140 * GIB))

    def limit(memory: HostMemory, device: torch.device) -> int:
        assert memory == HOST
        return 8 * GIB

    use = Instruments(
        memory=lambda: HOST, matmul_flops=lambda dtype, device: 1e12, host_bytes_s=lambda: 2e10,
        attention_flops=lambda dtype, device: 1e12,
        update_parameters_s=lambda: 1e8, link_bytes_s=lambda device: (2e10, 2e10),
        operation_overhead_s=lambda device: 1e-4, pinned_limit_bytes=limit,
    )  # fmt: skip
    profile = measure(instruments=use).profile
    assert profile.pinned_limit_bytes == 8 * GIB
    rings = profile.host_memory_bytes - Budgets.of(profile).host_bytes
    assert rings == 6 * PinnedMemory(Driver(0)).slab_bytes
    assert Budgets.of(profile.model_copy(update={"pinned_limit_bytes": None})).host_bytes == profile.host_memory_bytes
