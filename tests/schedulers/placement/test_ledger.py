"""When there is room on a node."""

from __future__ import annotations

from typing import Any

from lazytrain.schedulers.placement import Gpu
from lazytrain.schedulers.placement.ledger import Ledger


def test_room_comes_back_as_jobs_end(make: Any) -> None:
    node = make.node("a", gpus=2, host=100)
    jobs = [make.running("x", "a", "0", host=70, remaining_s=50.0), make.running("y", "a", None, host=20)]
    ledger = Ledger(node, jobs, 0.0)
    assert [gpu.id for gpu in ledger.free_gpus] == ["1"]
    assert ledger.earliest(make.option(host=10), 0.0) == 0.0
    assert ledger.earliest(make.option(host=80), 0.0) == 50.0, "the GPU is free, its memory is not"
    assert ledger.earliest(make.option(host=81), 0.0) == 3600.0, "a paused job keeps its memory"
    assert ledger.earliest(make.option(host=101), 0.0) is None


def test_bad_and_foreign_gpus_are_no_room(make: Any) -> None:
    cards = (Gpu(id="0", state="bad"), Gpu(id="1", state="busy"), Gpu(id="2"))
    ledger = Ledger(make.node("a", cards=cards), [make.running("x", "a", "2", remaining_s=9.0)], 0.0)
    assert not ledger.free_gpus
    assert ledger.earliest(make.option(), 0.0) == 9.0
    assert ledger.usable
    assert not Ledger(make.node("a", cards=cards[:1]), [], 0.0).usable
    assert not Ledger(make.node("a", drained=True), [], 0.0).usable


def test_what_is_placed_is_held(make: Any) -> None:
    ledger = Ledger(make.node("a", gpus=2, host=100), [], 0.0)
    ledger.place(make.option(host=60), 0.0, 100.0)
    assert (ledger.room(0.0).gpus, ledger.room(100.0).gpus) == (1, 2)
    assert ledger.earliest(make.option(host=50), 0.0) == 100.0
    twin = ledger.copy()
    twin.place(make.option(host=10), 0.0, 200.0)
    assert ledger.room(0.0).gpus == 1, "a copy has entries of its own"
    assert twin.next_free(100.0) == 200.0
