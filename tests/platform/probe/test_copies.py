"""Copies over emulated links, which are as slow as they say; GPUs that copy at once meet before and after."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lazytrain.platform.probe.copies import Copier
from lazytrain.schedulers.hardware import HardwareProfile, hardware


def base(**rates: float) -> HardwareProfile:
    return hardware("RTX3090").model_copy(update={"device": "emulated", **rates})


def test_an_emulated_link_is_no_faster_than_it_says_in_either_direction() -> None:
    copier = Copier(base(h2d_bytes_s=8e8, d2h_bytes_s=4e8))
    (there,) = copier.rates(["h2d"], seconds=0.0)
    there_too, back = copier.rates(["h2d", "d2h"], seconds=0.0)
    assert max(there, there_too) <= 1.01 * 8e8 and back <= 1.01 * 4e8
    assert min(there, there_too, back) > 1e7


def test_each_copies_from_before_the_first_is_counted_until_the_last_is_done() -> None:
    """The fast one has counted what it has to long before the slow one, and copies on."""
    meeting = threading.Barrier(2, timeout=60)
    log: list[str] = []
    found: dict[str, float] = {}

    def measure(name: str, rate: float) -> None:
        copier = Copier(base(h2d_bytes_s=rate))
        copy, times = copier._links["h2d"], iter(["may count", "is done"])

        def noted(number: int) -> None:
            copy(number)
            log.append(f"{name} copies")

        def meet() -> None:
            log.append(f"{name} {next(times)}")
            meeting.wait()

        copier._links["h2d"] = noted
        (found[name],) = copier.rates(["h2d"], meet, seconds=0.0)

    threads = [threading.Thread(target=measure, args=each) for each in (("slow", 3e8), ("fast", 6e9))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0 < found["slow"] <= 3.03e8 and found["fast"] > 0
    for name in ("slow", "fast"):
        assert log.index(f"{name} copies") < log.index(f"{name} may count")
    last_to_count = log.index("slow is done")
    assert log.index("fast is done") < last_to_count
    assert "fast copies" in log[log.index("fast is done") : last_to_count]


def test_what_goes_wrong_where_they_meet_is_raised_and_nothing_goes_on() -> None:
    def broken() -> None:
        raise threading.BrokenBarrierError

    before = threading.active_count()
    with pytest.raises(threading.BrokenBarrierError):
        Copier(base()).rates(["h2d", "d2h"], broken)
    assert threading.active_count() == before


def test_a_copy_that_fails_is_raised() -> None:
    copier = Copier(base())

    def fail(number: int) -> Any:
        raise RuntimeError("the link is down")

    copier._links["d2h"] = fail
    with pytest.raises(RuntimeError, match="the link is down"):
        copier.rates(["h2d", "d2h"])
