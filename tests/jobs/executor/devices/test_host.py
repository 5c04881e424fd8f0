from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch

from lazytrain.jobs.executor.devices import host
from lazytrain.jobs.executor.devices.host import PAGE, numa_node_of, numa_nodes, page_aligned


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PAGE + 1, 3 * 2**20 + 5])
def test_memory_starts_at_a_page_is_zero_and_as_long_as_asked(nbytes):
    tensor = page_aligned(nbytes)
    assert (tensor.nbytes, tensor.dtype) == (nbytes, torch.uint8)
    assert nbytes == 0 or tensor.data_ptr() % PAGE == 0
    assert not tensor.any()
    assert tensor.untyped_storage().nbytes() == nbytes  # not a power of two


def test_memory_lives_as_long_as_a_view_of_it():
    view = page_aligned(PAGE)[10:20]
    view.fill_(7)
    page_aligned(PAGE)
    assert view.eq(7).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_counts_as_the_process_s_own():
    """What keeps a run within its host memory counts what is resident and not shared."""

    def own() -> int:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return (resident - shared) * PAGE

    before, size = own(), 64 << 20
    tensor = page_aligned(size).fill_(1)
    assert own() - before > 0.9 * size
    del tensor
    assert own() - before < 0.1 * size


def node_tree(root, has_memory, numa_node):
    nodes = root / "devices/system/node"
    nodes.mkdir(parents=True)
    (nodes / "has_memory").write_text(has_memory + "\n")
    device = root / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{numa_node}\n")


@pytest.mark.parametrize(
    ("has_memory", "numa_node", "nodes", "node"),
    [("0", 0, [0], None), ("0-1", 1, [0, 1], 1), ("0,2-3", 3, [0, 2, 3], 3), ("0-1", -1, [0, 1], None)],
)
def test_the_node_of_a_gpu(tmp_path, has_memory, numa_node, nodes, node):
    node_tree(tmp_path, has_memory, numa_node)
    assert numa_nodes(tmp_path) == nodes
    assert numa_node_of("0000:3B:00.0", tmp_path) == node
    assert numa_node_of("0000:99:00.0", tmp_path) is None


def test_without_a_node_tree_nothing_is_known(tmp_path):
    assert numa_nodes(tmp_path) == []
    assert numa_node_of("0000:3b:00.0", tmp_path) is None


def test_the_kernel_has_the_preference_for_the_node():
    """``get_mempolicy`` (239) with MPOL_F_ADDR (2) tells the policy of an address."""
    if host.platform.machine() != "x86_64" or 0 not in numa_nodes():
        pytest.skip("the system call's number is that of x86-64")
    tensor = page_aligned(10 * PAGE, node=0)
    mode, words, libc = ctypes.c_int(-1), (ctypes.c_ulong * 16)(), ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(tensor.data_ptr())
    result = libc.syscall(
        ctypes.c_long(239), ctypes.byref(mode), words, ctypes.c_ulong(1024), address, ctypes.c_ulong(2)
    )
    if result != 0:
        pytest.skip("get_mempolicy is not allowed here")
    assert (mode.value, words[0]) == (1, 1)


def test_a_node_that_does_not_exist_leaves_usable_memory(caplog):
    caplog.set_level("INFO")
    tensor = page_aligned(PAGE, node=63)
    assert not tensor.any()
    assert "NUMA" in caplog.text
