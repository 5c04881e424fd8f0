"""Threads stay near the memory that they work on."""

import os

import pytest

from lazytrain.jobs.executor.devices.cores import cores_of, numbers, stay_on

needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")


@pytest.fixture
def asked(monkeypatch):
    """What was asked of a kernel that gave this process the cores 0, 1, 8 and 9."""
    found = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 8, 9})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: found.append(cores))
    return found


@pytest.fixture
def tree(tmp_path):
    for node, cores in enumerate(["0-7", "8-15", "16-23", ""]):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    return tmp_path


def test_lists_of_the_kernel():
    assert numbers("0-3,8,10-11") == [0, 1, 2, 3, 8, 10, 11]
    assert numbers("") == []


def test_cores_of_a_node(tree):
    assert cores_of(1, tree) == set(range(8, 16))
    assert cores_of(3, tree) == cores_of(7, tree) == set()


@needs_affinity
def test_threads_stay_on_those_given_cores_that_are_near(tree, asked):
    assert stay_on(1, tree) == {8, 9}
    assert asked == [{8, 9}]


@needs_affinity
@pytest.mark.parametrize("node", [None, 2, 3, 7])
def test_without_a_near_core_all_that_were_given_stay(tree, asked, node):
    assert stay_on(node, tree) == {0, 1, 8, 9}
    assert asked == []
