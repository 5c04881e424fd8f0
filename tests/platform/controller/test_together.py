"""Jobs that share a node are planned together, and told what they reach beside each other."""

from dataclasses import replace
from typing import Any

import pytest

from lazytrain.jobs.errors import OutOfTime
from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.admission import Answer, Question, Way
from lazytrain.schedulers.hardware import hardware
from lazytrain.schedulers.placement import decide

S = JobState
World = Any
LINK = hardware("H800").host_bytes_s


@pytest.fixture
def lab(world: World) -> World:
    """A node with two GPUs, and jobs that each ask for 60 % of its host memory's bandwidth."""
    world.decide = decide
    world.add_machine("a", gpus=2)
    world.planner = HungryPlanner()
    world.config = replace(world.config, search_batch=False)
    world.new_controller()
    return world


class HungryPlanner:
    """Plans at once what is asked about one job, and about several when the test says so."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.questions: list[Question] = []
        self.silent = False
        self.error: OutOfTime | None = None
        self.company: dict[str, Any] = {"policy": None, "words": "", "tokens_per_s": 0.0}

    def submit(self, order: Any) -> None:
        if not isinstance(order, Question):
            self.found[order.job] = planned(order.profiles, 100.0, 0.6)
        elif order.kind == "company" or order.job not in [question.job for question in self.questions]:
            self.questions.append(order)

    def results(self) -> dict[str, Any]:
        for question in [] if self.silent else self.questions:
            if question.kind == "company":
                self.found[question.job] = Answer(values=self.company)
                continue
            ways = [planned(["H800"], 80.0, 0.2).ways["H800"].model_dump() for _ in question.values["starting"]]
            self.found[question.job] = self.error or Answer(values={"ways": ways, "tokens_per_s": [80.0] * len(ways)})
        found, self.found = self.found, {}
        return found

    def close(self) -> None:
        pass


def planned(kinds: Any, tokens_per_s: float, share: float) -> Any:
    from lazytrain.platform.admission import Admission

    option = {"tokens_per_s": tokens_per_s, "work_tokens": 1e6, "host_bytes": 1 << 30, "dram_bytes_s": share * LINK}
    policy = {"share": share}
    ways = {kind: Way(option={"kind": kind, **option}, policy=policy, device={"kind": "cuda"}) for kind in kinds}
    return Admission(batch=8, steps=100, ways=ways, limits={})


def test_the_second_job_of_a_node_is_planned_for_what_the_first_one_leaves(lab: World) -> None:
    first = lab.submit()
    lab.running(first)
    assert lab.planner.questions == []  # alone there is nothing to plan together
    second = lab.submit()
    lab.running(second)
    (question,) = lab.planner.questions
    assert question.kind == "together"
    assert [job["spec"] for job in question.values["starting"]] == [second.spec]
    assert [job["option"]["dram_bytes_s"] for job in question.values["beside"]] == [0.6 * LINK]
    assert lab.run(second).order.policy == {"share": 0.2}
    assert lab.run(first).order.policy == {"share": 0.6}
    started = next(event.sentence for event in lab.store.jobs.events(second.id) if event.state == "STARTING")
    assert f"planned together with {first.id}: 80 tokens/s" in started


def test_both_are_told_what_they_reach_beside_each_other(lab: World) -> None:
    lab.planner.error = OutOfTime("no plan in time")  # both keep the plans that they have alone
    first, second = lab.submit(), lab.submit()
    lab.steps(4)
    for job in (first, second):
        lab.running(job) if lab.state(job) is S.STARTING else None
    lab.steps(1)
    for job, other in ((first, second), (second, first)):
        assert f"beside {other.id}: 83 tokens/s are expected, 83 % of its speed alone" in lab.job(job).sentence
    lab.finish(first)
    lab.steps(2)
    assert lab.job(second).sentence == "trains on a"


def test_what_was_planned_together_counts_from_then_on(lab: World) -> None:
    """0.6 + 0.2 of the bandwidth: nobody is slowed, and nobody is told so."""
    first = lab.submit()
    lab.running(first)
    second = lab.submit()
    lab.running(second)
    lab.steps(1)
    assert lab.job(first).sentence == lab.job(second).sentence == "trains on a"
    (running,) = [job for job in lab.questions[-1].running if job.id == second.id]
    assert (running.option.tokens_per_s, running.option.dram_bytes_s) == (80.0, 0.2 * LINK)


def test_a_job_waits_for_its_plan_and_says_so_but_not_for_ever(lab: World) -> None:
    lab.planner.silent = True
    first, second = lab.submit(), lab.submit()
    lab.steps(4)
    assert {lab.state(first), lab.state(second)} == {S.QUEUED}
    assert lab.job(first).reason == "planned_together"
    lab.steps(3, seconds=60.0)
    assert {lab.state(first), lab.state(second)} == {S.STARTING}
    assert lab.run(first).order.policy == {"share": 0.6}


def test_the_plan_of_a_pair_is_not_that_of_a_later_run_alone(lab: World) -> None:
    first = lab.submit()
    lab.running(first)
    second = lab.submit()
    lab.running(second)
    lab.finish(first)
    lab.end(second, how="died", message="lost")
    lab.steps(6, seconds=60.0)
    assert lab.job(second).attempt == 2
    assert lab.run(second).order.policy == {"share": 0.6}


def test_a_restarted_controller_asks_again(lab: World) -> None:
    lab.planner.silent = True
    first, second = lab.submit(), lab.submit()
    lab.steps(4)
    asked = len(lab.planner.questions)
    lab.planner = HungryPlanner()
    lab.new_controller()
    lab.steps(3)
    assert asked == len(lab.planner.questions) == 1
    assert {lab.state(first), lab.state(second)} == {S.STARTING}


def test_a_job_that_measures_its_batch_there_is_not_planned_together(lab: World) -> None:
    lab.config = replace(lab.config, search_batch=True)
    lab.new_controller()
    first, second = lab.submit(), lab.submit()
    lab.steps(4)
    assert lab.planner.questions == []
    assert {lab.state(first), lab.state(second)} == {S.STARTING}


def company_of(lab: World) -> list[Question]:
    return [question for question in lab.planner.questions if question.kind == "company"]


def trains(lab: World, job: Any, *, left_s: float = 1e5) -> None:
    run = lab.run(job)
    run.step, run.step_s, run.beat = 3, left_s / 97, run.beat + 1


def test_a_run_is_switched_when_a_neighbour_comes_and_when_it_goes(lab: World) -> None:
    first = lab.submit()
    run = lab.running(first)
    trains(lab, first)
    lab.steps(3)
    assert company_of(lab) == []  # nobody has come
    asks = {"tokens_per_s": 70.0, "dram_bytes_s": 0.1 * LINK}
    lab.planner.company = {"policy": {"share": 0.1}, "words": "beside 1", "tokens_per_s": 70.0, "option": asks}
    second = lab.submit()
    lab.running(second)
    lab.steps(2)
    (question,) = company_of(lab)
    assert question.values["policy"] == {"share": 0.6}
    assert [job["option"]["dram_bytes_s"] for job in question.values["beside"]] == [0.2 * LINK]
    assert "copies_bytes_s" not in question.values["node"]  # nobody has measured it
    assert run.policies == [{"share": 0.1}]
    assert lab.job(first).sentence == "trains on a by a new plan; beside 1"
    third = lab.submit()
    lab.steps(2)
    (running,) = [job for job in lab.questions[-1].running if job.id == first.id]
    assert running.option.dram_bytes_s == 0.1 * LINK  # that is what placement counts with
    lab.ask(third, "stop")
    lab.steps(1)
    lab.planner.company = {"policy": {"share": 0.5}, "words": "alone", "tokens_per_s": 99.0, "option": asks}
    lab.finish(second)
    lab.steps(3)
    assert [len(question.values["beside"]) for question in company_of(lab)] == [1, 0]
    assert run.policies == [{"share": 0.1}, {"share": 0.5}]


def test_a_policy_for_company_is_that_runs_alone(lab: World) -> None:
    first = lab.submit()
    lab.running(first)
    trains(lab, first)
    lab.planner.company = {"policy": {"share": 0.1}, "words": "x", "tokens_per_s": 70.0, "option": {}}
    second = lab.submit()
    lab.running(second)
    lab.steps(2)
    assert lab.run(first).policies == [{"share": 0.1}]
    lab.finish(second)
    lab.end(first, how="died", message="lost")
    lab.steps(6, seconds=60.0)
    assert lab.run(first).order.policy == {"share": 0.6}


def test_a_run_that_gains_nothing_or_ends_soon_is_left_as_it_is(lab: World) -> None:
    first = lab.submit()
    run = lab.running(first)
    trains(lab, first)
    second = lab.submit()
    lab.running(second)
    lab.steps(3)
    assert len(company_of(lab)) == 1
    assert run.policies == []
    trains(lab, first, left_s=100.0)
    lab.finish(second)
    lab.steps(3)
    assert len(company_of(lab)) == 1


def test_a_run_is_asked_about_once_it_trains(lab: World) -> None:
    """Both start at once: each was planned for the other, and the one that is left is planned again."""
    first, second = lab.submit(), lab.submit()
    lab.steps(4)
    for job in (first, second):
        lab.running(job) if lab.state(job) is S.STARTING else None
    lab.steps(2)
    assert company_of(lab) == []
    lab.finish(second)
    lab.steps(2)
    assert company_of(lab) == []
    trains(lab, first)
    lab.steps(2)
    assert [question.values["beside"] for question in company_of(lab)] == [[]]
