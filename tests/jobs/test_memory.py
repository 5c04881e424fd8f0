"""The storage tracker against what tensors are known to take."""

from __future__ import annotations

import sys

import pytest
import torch

from lazytrain.jobs.errors import OutOfMemory
from lazytrain.jobs.memory import AliveBytes, StorageTracker


def test_a_storage_counts_once_until_its_last_view_is_gone():
    tracker = StorageTracker()
    with tracker:
        base = torch.ones(100)
        view = base.view(10, 10)
        assert tracker.live_bytes == 400
        del base
        assert tracker.live_bytes == 400
        product = view @ view
        assert (tracker.live_bytes, tracker.peak_bytes) == (800, 800)
        del view, product
    assert (tracker.live_bytes, tracker.peak_bytes) == (0, 800)


def test_what_was_there_before_and_what_is_changed_in_place_is_not_counted():
    before, tracker = torch.ones(50), StorageTracker()
    with tracker:
        before += 1
        before.t()
        before.detach()
    assert tracker.peak_bytes == 0


def test_it_goes_on_counting_after_it_is_left():
    tracker = StorageTracker()
    with tracker:
        kept = torch.ones(10)
    assert tracker.live_bytes == 40
    tracker.watch(torch.ones(5))
    assert (tracker.live_bytes, tracker.peak_bytes) == (40, 60)
    tracker.reset_peak()
    assert tracker.peak_bytes == 40
    del kept
    assert tracker.live_bytes == 0


def test_the_budget_is_exact_and_what_did_not_fit_is_not_counted():
    tracker = StorageTracker(budget_bytes=400)
    with tracker:
        first = torch.ones(60)
        torch.ones(40)
        with pytest.raises(OutOfMemory) as caught:
            torch.ones(41)
        assert (caught.value.requested_bytes, caught.value.used_bytes, caught.value.budget_bytes) == (164, 240, 400)
        second = torch.ones(40)
    assert tracker.live_bytes == first.nbytes + second.nbytes == 400


def test_no_python_code_runs_where_something_is_freed():
    """A Ctrl-C that arrived in it would be lost."""
    tracker, seen = StorageTracker(), list[str]()
    with tracker:
        held = [torch.ones(10) for _ in range(3)]
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_name) if event == "call" else None)
    try:
        held.clear()
    finally:
        sys.setprofile(None)
    assert not seen and tracker.live_bytes == 0


def test_a_storage_in_the_place_of_one_that_was_freed_is_counted_until_it_is_freed():
    """Its number is that of the other, whose end nobody has asked about yet."""
    alive = AliveBytes()
    for _ in range(50):
        kept = torch.ones(10)
        alive.add(kept.untyped_storage())
        del kept
    kept = torch.ones(10)
    assert alive.add(kept.untyped_storage()) and alive.bytes == alive.peak_bytes == 40
    assert alive.add(kept.untyped_storage(), 40) and not alive.add(torch.ones(1).untyped_storage(), 40)
    del kept
    assert alive.bytes == 0
