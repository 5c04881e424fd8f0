"""The search on a real local Ray, with probes that only pretend to train."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from lazytrain.jobs.errors import DoesNotFit, HardwareError, LazytrainError, ModelError, OutOfTime
from lazytrain.jobs.model_facts import ModelFacts, UnitFacts
from lazytrain.jobs.policy import Policy, Predicted
from lazytrain.platform.cluster.local import LocalRay
from lazytrain.platform.settings import Settings
from lazytrain.platform.trial import Report
from lazytrain.platform.tuning import SearchOrder, Trial, _AskTell, search_batch
from lazytrain.schedulers.planner import Plan, Reason

pytestmark = [pytest.mark.ray, pytest.mark.slow]

KIND = "test-gpu"
Run = Callable[[Policy, ModelFacts], Any]


@pytest.fixture(scope="module", autouse=True)
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRay]:
    with LocalRay(Settings(home=tmp_path_factory.mktemp("home"), ray_auth="disabled"), kind=KIND, cpus=2) as running:
        yield running


def unit(name: str, kind: str) -> UnitFacts:
    return UnitFacts(
        name=name,
        kind=kind,  # type: ignore[arg-type]
        variety="test",
        parameters=4,
        weight_bytes=256,
        forward_flops=1.0,
        output_bytes=64,
        saved_bytes=1,
        saved_matmul_bytes=1,
        forward_workspace_bytes=1,
        backward_workspace_bytes=1,
    )


def facts_of(batch: int) -> ModelFacts:
    return ModelFacts(
        architecture="Test",
        dtype="float32",
        micro_batch=batch,
        sequence_length=4,
        hidden_size=1,
        vocabulary=4,
        parameters=16,
        side_bytes=0,
        before=(unit("embed", "before"),),
        layers=(unit("layers.0", "layer"), unit("layers.1", "layer")),
        after=(),
        head=unit("head", "head"),
    )


def predicted(tokens_per_s: float) -> Predicted:
    return Predicted(
        step_s=1.0,
        tokens_per_s=tokens_per_s,
        tflops_6n=1.0,
        compute_units=3.0,
        peak_gpu_bytes=1,
        peak_host_bytes=1,
        nvme_bytes=0,
        host_bytes_per_parameter=8.0,
        exposed_s={},
    )


def plan_up_to(largest: int) -> Callable[[int], tuple[ModelFacts, Plan]]:
    held = threading.RLock()  # as a progress display has one: planning happens here and is never sent anywhere

    def plan_batch(batch: int) -> tuple[ModelFacts, Plan]:
        with held:
            facts = facts_of(batch)
        if batch > largest:
            short = Reason(resource="gpu_memory", needed_bytes=9, available_bytes=4, shortfall_bytes=5, hint="more")
            return facts, Plan(feasible=False, reasons=(short,))
        policy = Policy.from_homes(facts, ["host", "host", "gpu"])
        return facts, Plan(feasible=True, policy=policy, predicted=predicted(50.0 * batch))

    return plan_batch


NOTHING = asdict(Report(fits=False))


def fits_up_to(limit: int, *, dies_above: int = 10**9) -> Run:
    """Its answers are like a `Report`, which these processes would import torch for: two thirds of their time."""
    nothing = NOTHING  # names of this module mean nothing where it runs

    def run(policy: Policy, facts: ModelFacts) -> SimpleNamespace:
        if policy.micro_batch > dies_above:
            os._exit(9)
        said = {**nothing, "pid": os.getpid()}
        if policy.micro_batch > limit:
            return SimpleNamespace(**{**said, "reason": "out of memory"})
        return SimpleNamespace(**{**said, "fits": True, "tokens_per_s": 100.0 * policy.micro_batch})

    return run


def order(tmp_path: Path, run: Run, *, job_id: str = "job", largest: int = 10**9, **given: object) -> SearchOrder:
    fields: dict[str, object] = {"low": 1, "high": 8, "objective": "max_batch", "most_probes": 6, "kind": KIND}
    return SearchOrder(
        job_id=job_id,
        plan_batch=plan_up_to(largest),  # type: ignore[arg-type]
        run=run,
        directory=tmp_path,
        **{**fields, **given},  # type: ignore[arg-type]
    )


def test_out_of_memory_and_death_are_results_and_every_probe_has_its_own_process(tmp_path: Path) -> None:
    heard: list[Trial] = []
    search = search_batch(order(tmp_path, fits_up_to(6, dies_above=8), largest=9, high=12), heard.append)
    assert search.best.batch == 6
    told = [(trial.batch, trial.report.reason) for trial in search.trials]
    assert told == [(9, "the process of the probe died"), (8, "out of memory"), (6, ""), (7, "out of memory")]
    assert heard == search.trials
    pids = [trial.report.pid for trial in search.trials if trial.report.pid]
    assert len(set(pids)) == len(pids) == 3
    assert os.getpid() not in pids
    assert given_back()


def test_when_the_time_is_up_the_best_so_far_has_to_do(tmp_path: Path) -> None:
    search = search_batch(order(tmp_path, fits_up_to(7), most_seconds=0.0))
    assert [trial.batch for trial in search.trials] == [8, 7]  # one has to fit
    assert search.best.batch == 7


def test_nothing_fits(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match="out of memory"):
        search_batch(order(tmp_path, fits_up_to(0), high=1))
    with pytest.raises(DoesNotFit, match="gpu_memory is 5 bytes short"):  # what planning excludes costs no process
        search_batch(order(tmp_path, fits_up_to(9), largest=0))


def test_the_batch_that_plans_call_fastest_is_tried_first_and_none_without_a_plan(tmp_path: Path) -> None:
    asked = order(tmp_path, fits_up_to(9), objective="throughput")

    def plan_batch(batch: int) -> tuple[ModelFacts, Plan]:
        if batch > 3:
            raise OutOfTime("no plan was found")
        return asked.plan_batch(batch)

    search = search_batch(SearchOrder(**{**vars(asked), "plan_batch": plan_batch}))
    assert [trial.batch for trial in search.trials] == [3]


def test_a_broken_probe_is_an_error_and_not_a_small_batch(tmp_path: Path) -> None:
    def run(policy: Policy, facts: ModelFacts) -> Any:
        raise ModelError("no such weights", hint="look")

    with pytest.raises(ModelError, match="no such weights"):
        search_batch(order(tmp_path, run))


def test_a_bug_in_a_probe_is_named(tmp_path: Path) -> None:
    def run(policy: Policy, facts: ModelFacts) -> Any:
        raise TypeError("unexpected keyword")

    with pytest.raises(LazytrainError, match="TypeError: unexpected keyword"):
        search_batch(order(tmp_path, run))


def test_an_error_while_planning_is_raised_here(tmp_path: Path) -> None:
    def plan_batch(batch: int) -> tuple[ModelFacts, Plan]:
        raise ModelError("no layers")

    asked = order(tmp_path, fits_up_to(1))
    with pytest.raises(ModelError, match="no layers"):
        search_batch(SearchOrder(**{**vars(asked), "plan_batch": plan_batch}))


def answers(speed: float, most: int) -> Run:
    said = {**NOTHING, "fits": True, "tokens_per_s": speed}

    def run(policy: Policy, facts: ModelFacts) -> SimpleNamespace:
        return SimpleNamespace(**{**said, "fits": policy.micro_batch <= most})

    return run


def test_two_searches_at_once_do_not_run_each_others_code(tmp_path: Path) -> None:
    """The second begins while the first has a probe left, which Ray Tune looks up by its name."""
    first = order(tmp_path / "a", answers(1.0, most=1), job_id="a", high=2)
    second = order(tmp_path / "b", answers(2.0, most=1), job_id="b", high=1)
    begun, found = threading.Event(), []

    def plan_second(batch: int) -> tuple[ModelFacts, Plan]:
        begun.set()
        return second.plan_batch(batch)

    beside = threading.Thread(
        target=lambda: found.append(search_batch(replace(second, plan_batch=plan_second))), daemon=True
    )

    def plan_first(batch: int) -> tuple[ModelFacts, Plan]:
        if batch == 1 and not begun.is_set():
            beside.start()
            assert begun.wait(60)
        return first.plan_batch(batch)

    tried = search_batch(replace(first, plan_batch=plan_first))
    beside.join(60)
    assert [(trial.batch, trial.report.fits) for trial in tried.trials] == [(2, False), (1, True)]
    assert [search.best.report.tokens_per_s for search in (tried, *found)] == [1.0, 2.0]


def test_a_gpu_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="H800"):
        search_batch(order(tmp_path, fits_up_to(1), kind="H800"))


def test_no_more_plans_are_made_once_it_is_asked_to_stop(tmp_path: Path) -> None:
    """Ray Tune waits for a suggestion, which may take a dozen plans, and the cluster closes while it does."""
    planned: list[int] = []
    asked = order(tmp_path, fits_up_to(8), objective="throughput", high=64)

    def plan_batch(batch: int) -> tuple[ModelFacts, Plan]:
        planned.append(batch)
        return asked.plan_batch(batch)

    counting = SearchOrder(**{**vars(asked), "plan_batch": plan_batch})
    assert _AskTell(counting, lambda: len(planned) == 3).suggest("a") == _AskTell.FINISHED
    assert len(planned) == 3


def test_ctrl_c_gives_everything_back(tmp_path: Path) -> None:
    heard: list[Trial] = []

    def interrupt() -> None:  # called all the time, not only between probes
        if heard:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_batch(order(tmp_path, fits_up_to(2)), heard.append, interrupt)
    assert given_back()


def given_back() -> bool:
    """Whether the GPU is free and no placement group is left; Ray may take ten seconds to say so."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
        if ray.available_resources().get("GPU") == 1 and not groups:
            return True
    return False
