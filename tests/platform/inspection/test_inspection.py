"""What a node says of itself, from a driver and a file system that are made up."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from lazytrain.platform.inspection import compare, list_devices, versions
from lazytrain.platform.inspection.gpus import pcie_root

GPUS = """0, GPU-b, 00000000:81:00.0, 20480, 580.95.05
1, GPU-a, 00000000:41:00.0, 3, 580.95.05
"""
PROCESSES = """GPU-b, 17, 4096
GPU-b, 18, 16384
"""


def driver(arguments: Sequence[str]) -> str:
    return GPUS if "query-gpu" in arguments[0] else PROCESSES


@pytest.fixture
def root(tmp_path: Path) -> Path:
    devices = tmp_path / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    for port, address in (("0000:80:01.0", "0000:81:00.0"), ("0000:40:03.1", "0000:41:00.0")):
        target = tmp_path / "sys/devices" / f"pci{port[:7]}" / port / address
        target.mkdir(parents=True)
        (devices / address).symlink_to(target)
    for pid, command in (("17", "python\0-m\0lazytrain.platform.cluster.run_process\0x"), ("18", "python\0other.py")):
        (tmp_path / "proc" / pid).mkdir(parents=True)
        (tmp_path / "proc" / pid / "cmdline").write_text(command)
    return tmp_path


def test_gpus_by_identity_with_their_root_and_who_uses_them(root: Path) -> None:
    first, second = list_devices(driver, root, {})
    assert (first.id, first.pcie_root, first.busy) == ("GPU-a", "pci0000:40/0000:40:03.1", "")
    assert (second.id, second.pcie_root) == ("GPU-b", "pci0000:80/0000:80:01.0")
    assert first.driver == second.driver == "580.95.05"
    assert second.busy == "16.0GiB of it are in use by something else"  # the other 4 GiB are ours


@pytest.mark.parametrize(("named", "seen"), [("1", ["GPU-a"]), ("GPU-b,GPU-a", ["GPU-b", "GPU-a"]), ("", [])])
def test_only_those_that_the_node_may_use(root: Path, named: str, seen: list[str]) -> None:
    assert [d.id for d in list_devices(driver, root, {"CUDA_VISIBLE_DEVICES": named})] == seen


def test_without_a_driver_there_are_none() -> None:
    assert list_devices(lambda arguments: "", Path("/nowhere"), {}) == []
    assert pcie_root("00000000:81:00.0", Path("/nowhere")) == ""


def test_versions_of_this_process_are_like_themselves() -> None:
    mine = versions()
    assert mine["lazytrain"]
    assert mine["ray"]
    assert compare(mine, mine).problem == compare(mine, mine).warning == ""


def test_a_local_version_of_torch_is_the_same_minor() -> None:
    found = compare({"torch": "2.13.0+cpu"}, {"torch": "2.13.0+cu130"})
    assert found.problem == ""
    assert "torch" in found.warning
