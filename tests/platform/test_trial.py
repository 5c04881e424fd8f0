"""Real probes in this process: what is inside a trial."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from lazytrain.jobs.data import Batch, prepare
from lazytrain.jobs.errors import LazytrainError
from lazytrain.jobs.executor import Emulated
from lazytrain.jobs.policy import Policy
from lazytrain.jobs.spec import Lora, load_spec
from lazytrain.platform import trial
from lazytrain.platform.models import facts_of, model_of
from lazytrain.platform.trial import Order, run_probe


@pytest.fixture
def order(tiny_job: Path) -> Order:
    spec = load_spec(tiny_job, ("plan.nvme=null",))
    rows = prepare(spec.data, AutoTokenizer.from_pretrained(spec.model.path)).train
    return Order(spec=spec, device="cpu", rows=rows, seconds=0.0)


def planned(order: Order, batch: int):  # type: ignore[no-untyped-def]
    length = max(map(len, order.rows.input_ids))
    facts = facts_of(model_of(order.spec), batch=batch, length=length, dtype="float32")
    return Policy.from_homes(facts, ["host"] * len(facts.layers) + ["gpu"]), facts


def test_a_probe_trains_and_measures(order: Order) -> None:
    report = run_probe(order, *planned(order, 4))
    assert report.fits
    assert report.steps >= 5
    assert 0 < report.loss < 20
    assert report.tokens_per_s > 0
    assert report.peak_device_bytes > 0


def test_adapters_are_probed_where_the_job_trains_them(order: Order) -> None:
    full = run_probe(order, *planned(order, 4))
    spec = order.spec.model_copy(update={"lora": Lora(rank=2)})
    lora = Order(spec=spec, device="cpu", rows=order.rows, seconds=0.0)
    policy, facts = planned(lora, 4)
    report = run_probe(lora, policy, facts)
    assert report.fits and report.steps >= 5
    assert report.loss > full.loss  # which moves all weights


def test_out_of_memory_is_a_result(order: Order) -> None:
    small = Order(spec=order.spec, device=Emulated(memory_bytes=2_000_000), rows=order.rows, seconds=0.0)
    report = run_probe(small, *planned(order, 4))
    assert not report.fits
    assert "out of memory on gpu" in report.reason


def test_a_probe_that_trains_nothing_is_an_error(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_steps", lambda *arguments: ([1.0], float("nan")))
    with pytest.raises(LazytrainError, match="did not train"):
        run_probe(order, *planned(order, 2))


def test_the_probed_batch_has_the_longest_rows_and_padding(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Batch] = []

    def steps(streamed: object, batch: Batch, accumulation: int, seconds: float) -> "tuple[list[float], float]":
        seen.append(batch)
        return [1.0], float("nan")

    monkeypatch.setattr(trial, "_steps", steps)
    with pytest.raises(LazytrainError):
        run_probe(order, *planned(order, 3))
    (batch,) = seen
    assert batch.input_ids.shape == (3, max(map(len, order.rows.input_ids)))
    assert not bool(batch.attention_mask.bool().all())
    assert torch.equal(batch.labels != -100, (batch.labels != -100) & batch.attention_mask.bool())


@pytest.mark.parametrize(
    ("times", "error"),
    [([1.0], 0.0), ([2.0, 2.0, 2.0], 0.0), ([0.9, 1.0, 1.1], 0.0724), ([0.99, 1.01] * 50, 0.00126)],
)
def test_how_well_a_median_is_known(times: list[float], error: float) -> None:
    assert trial.standard_error(times) == pytest.approx(error, rel=0.01)


def test_steps_are_measured_until_they_agree_or_the_time_is_up() -> None:
    calm, restless = [1.0, 1.001, 0.999], [1.0, 2.0, 1.0]
    assert not trial._told_enough(calm, 3.9, 4.0)
    assert trial._told_enough(calm, 4.0, 4.0)
    assert not trial._told_enough(restless, 11.9, 4.0)
    assert trial._told_enough(restless, 12.0, 4.0)
