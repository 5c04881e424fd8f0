"""A world without processes: machines, planning and time are plain values that a test changes."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.errors import LazytrainError, Unreachable
from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.admission import Admission, AdmissionOrder, Way
from lazytrain.platform.artifacts import JobFiles, write_json
from lazytrain.platform.cluster.runs import Look, Machine, NodeReport, Outcome, Phase, RunOrder
from lazytrain.platform.controller import Config, Controller, Decide
from lazytrain.platform.store import Action, Job, NewJob, Role, Store
from lazytrain.schedulers.hardware import MEASUREMENT, hardware
from lazytrain.schedulers.placement import Decisions, Preempt, Question, SolverReport, Start, Wait, WaitCode

MEASURED = hardware("H800").model_copy(update={"measurement": MEASUREMENT}).model_dump(mode="json")
_ALIVE = (Phase.STARTING, Phase.RUNNING, Phase.PAUSED)


@dataclass
class Run:
    """A run that the fake machines have."""

    order: RunOrder
    phase: Phase = Phase.STARTING
    beat: int = 0
    step: int = 0
    step_s: float = 0.0
    doing: str = ""
    outcome: Outcome | None = None
    asked_to_stop: int = 0
    policies: list[Mapping[str, Any]] = field(default_factory=list)
    """That it was given while it ran."""
    ignores_stop: bool = False
    ignores_pause: bool = False


@dataclass
class FakeRunner:
    """Machines that do what the test says."""

    there: dict[str, Machine] = field(default_factory=dict)
    all: dict[str, Run] = field(default_factory=dict)
    started: list[RunOrder] = field(default_factory=list)
    profiles: dict[str, Mapping[str, Any] | LazytrainError | None] = field(default_factory=dict)
    reports: dict[str, NodeReport | None] = field(default_factory=dict)
    refuses: LazytrainError | None = None
    down: bool = False
    interrupt_start: bool = False

    def machines(self) -> list[Machine]:
        self._reach()
        return list(self.there.values())

    def inspect(self, machine: str, token_file: Path) -> NodeReport | None:
        return self.reports.get(machine, NodeReport(versions={}))

    def measure(self, machine: str) -> Mapping[str, Any] | None:
        found = self.profiles.get(machine, MEASURED)
        if isinstance(found, LazytrainError):
            raise found
        return found

    def start(self, order: RunOrder) -> None:
        self._reach()
        if self.refuses is not None:
            raise self.refuses
        if self.interrupt_start:
            raise KeyboardInterrupt
        assert order.claim not in self.all
        self.all[order.claim] = Run(order)
        self.started.append(order)

    def runs(self) -> set[str]:
        self._reach()
        return {claim for claim, run in self.all.items() if run.phase in _ALIVE}

    def look(self, claim: str, run_dir: Path, attempt: int) -> Look:
        run = self.all.get(claim)
        if run is None:
            return Look(Phase.ABSENT)
        return Look(run.phase, run.beat, run.step, 100, run.step_s, run.outcome, run.doing)

    def stop(self, claim: str, run_dir: Path) -> None:
        run = self.all.get(claim)
        if run is None or run.phase is Phase.ENDED:
            return
        run.asked_to_stop += 1
        if not run.ignores_stop:
            run.phase, run.outcome = Phase.ENDED, Outcome(how="stopped", step=run.step)

    def pause(self, claim: str, run_dir: Path) -> None:
        run = self.all.get(claim)
        if run is not None and run.phase is Phase.RUNNING and not run.ignores_pause:
            run.phase = Phase.PAUSED

    def resume(self, claim: str, run_dir: Path) -> None:
        run = self.all.get(claim)
        if run is not None and run.phase is Phase.PAUSED and not run.ignores_pause:
            run.phase = Phase.RUNNING

    def switch(self, claim: str, run_dir: Path, policy: Mapping[str, Any]) -> None:
        self.all[claim].policies.append(policy)

    def kill(self, claim: str) -> None:
        run = self.all.get(claim)
        if run is not None and run.phase in _ALIVE:
            run.phase, run.outcome = Phase.ENDED, Outcome(how="died", signal=9, step=run.step)

    def close(self) -> None:
        pass

    def _reach(self) -> None:
        if self.down:
            raise Unreachable("Ray does not answer")


@dataclass
class FakePlanner:
    """Planning that is done at once, in the way the test says."""

    answers: dict[str, Admission | LazytrainError] = field(default_factory=dict)
    asked: list[AdmissionOrder] = field(default_factory=list)
    waiting: dict[str, AdmissionOrder] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    memory_bytes: int = 1 << 30
    """What each job needs of its node."""
    tokens: float = 1e4
    """What each job has to train."""
    speeds: dict[str, float] = field(default_factory=dict)
    """Tokens per second by kind of node, 100 where it is not given."""
    notes: tuple[str, ...] = ()
    """What it says of each job."""

    def submit(self, order: AdmissionOrder) -> None:
        if order.job not in self.waiting:
            self.asked.append(order)
        self.waiting[order.job] = order

    def _planned(self, order: AdmissionOrder) -> Admission:
        found = admission(*order.profiles, host_bytes=self.memory_bytes)
        for kind, way in found.ways.items():
            way.option.update(tokens_per_s=self.speeds.get(kind, 100.0), work_tokens=self.tokens)
        return found.model_copy(update={"notes": self.notes})

    def results(self) -> dict[str, Admission | LazytrainError]:
        done = [order for order in self.waiting.values() if order.spec["name"] not in self.silent]
        self.waiting = {name: order for name, order in self.waiting.items() if order not in done}
        return {order.job: self.answers.get(order.spec["name"]) or self._planned(order) for order in done}

    def close(self) -> None:
        pass


def admission(*kinds: str, batch: int = 8, host_bytes: int = 1 << 30) -> Admission:
    """A plan that fits on these kinds of nodes."""
    return Admission(
        batch=batch,
        steps=100,
        ways={
            kind: Way(
                option={"kind": kind, "tokens_per_s": 100.0, "work_tokens": 1e4, "host_bytes": host_bytes},
                policy={"kind": kind},
                device={"kind": "cuda"},
            )
            for kind in kinds
        },
        limits={},
    )


def first_come(question: Question) -> Decisions:
    """Priority, then age; one job a GPU. Preempts for a job whose priority is higher by the margin of the rules."""
    free = [
        (node, gpu.id)
        for node in question.nodes
        if node.open
        for gpu in node.gpus
        if gpu.state == "free" and not any(job.node == node.name and job.gpu == gpu.id for job in question.running)
    ]
    starts, waits, preempts = [], [], []
    for job in sorted(question.waiting, key=lambda job: (-job.priority, job.submitted_s)):
        fits = [place for place in free if job.option(place[0].kind) and (not job.nodes or place[0].name in job.nodes)]
        if job.after or not fits:
            code = WaitCode.DEPENDENCY if job.after else WaitCode.GPU_BUSY
            waits.append(Wait(job=job.id, code=code, words=f"waits: {code.value}"))
            victims = [run for run in question.running if run.preemptible and job.priority - run.priority >= 20]
            preempts += [Preempt(job=run.id, for_job=job.id, words=f"makes room for {job.id}") for run in victims[:1]]
            continue
        node, gpu = fits[0]
        free.remove((node, gpu))
        option = job.option(node.kind)
        assert option is not None
        starts.append(
            Start(job=job.id, node=node.name, gpu=gpu, option=option, end_s=0, speed=1, words=f"starts on {node.name}")
        )
    return Decisions(
        starts=tuple(starts),
        preempts=tuple(preempts),
        waits=tuple(waits),
        running_end_s={},
        solver=SolverReport(status="GREEDY", objective=0, seconds=0),
    )


@dataclass
class World:
    """A controller with everything around it."""

    store: Store
    runner: FakeRunner
    planner: FakePlanner
    folder: Path
    now: float = 1000.0
    tick: float = 0.0
    """How much time goes by whenever somebody looks at the clock."""
    controllers: int = 0
    controller: Controller = None  # type: ignore[assignment]
    config: Config = field(default_factory=Config)
    decide: Decide = first_come
    questions: list[Question] = field(default_factory=list)

    def new_controller(self) -> Controller:
        """What starts after the one before was killed: nothing that one knew is left but the store."""
        self.controllers += 1
        self.now += self.config.lease_s
        self.planner.waiting = {}
        name = f"controller-{self.controllers}"
        self.controller = Controller(
            name, self.store, self.runner, self.planner, self._decide, self.config, self._clock
        )
        return self.controller

    def _clock(self) -> float:
        self.now += self.tick
        return self.now

    def _decide(self, question: Question) -> Decisions:
        self.questions.append(question)
        return self.decide(question)

    def add_machine(self, name: str, kind: str = "H800", gpus: int = 1) -> None:
        self.runner.there[name] = Machine(name=name, address="10.0.0.1", kind=kind, device="cuda", cpus=8, gpus=gpus)

    def submit(self, name: str = "tiny", *, priority: int = 50, user: str = "ada", **sections: Any) -> Job:
        self.now += 1e-3
        job_id = f"j-{uuid.uuid4().hex[:10]}"
        after = sections.pop("after", ())
        continues = sections.pop("continues", None)
        spec = {"name": name, "train": {"batch": "auto"}, "output": {"dir": "x"}, "queue": {"retries": 2}, **sections}
        run_dir = str(self.folder / job_id)
        job, _ = self.store.jobs.create(
            NewJob(
                id=job_id,
                user=user,
                name=name,
                spec=spec,
                run_dir=run_dir,
                priority=priority,
                after=after,
                continues=continues,
            ),
            self.now,
        )
        return job

    def steps(self, count: int = 1, seconds: float = 1.0) -> None:
        for _ in range(count):
            self.now += seconds
            self.controller.step()

    def job(self, job: Job) -> Job:
        return self.store.jobs.get(job.id)

    def state(self, job: Job) -> JobState:
        return self.job(job).state

    def run(self, job: Job) -> Run:
        claim = self.job(job).claim
        assert claim is not None
        return self.runner.all[claim]

    def running(self, job: Job) -> Run:
        """Let the job come to RUNNING."""
        self.steps(3)
        self.run(job).phase = Phase.RUNNING
        self.steps(1)
        assert self.state(job) is JobState.RUNNING
        return self.run(job)

    def end(self, job: Job, **outcome: Any) -> None:
        run = self.run(job)
        run.phase, run.outcome = Phase.ENDED, Outcome(**outcome)

    def finish(self, job: Job, steps: int = 100, loss: float = 0.5) -> None:
        """The run ends well, with everything that has to be there."""
        files = JobFiles(self.job(job).run_dir)
        record = {"status": "done", "steps": steps, "loss": loss}
        write_json(files.result, record)
        files.model.mkdir(exist_ok=True)
        (files.model / "model.safetensors").touch()
        self.end(job, how="done", result=record, step=steps)

    def ask(self, job: Job, action: str, **argument: Any) -> int:
        (number,) = self.store.jobs.ask([job.id], "ada", Action(action), self.now, **argument)
        return number


@pytest.fixture
def world(tmp_path: Path, empty_database: Path) -> Iterator[World]:
    shutil.copy(empty_database, tmp_path / "store.db")
    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    for user in ("ada", "ben"):
        store.people.add(user, Role.SUBMITTER, 0.0)
    world = World(store, FakeRunner(), FakePlanner(), tmp_path / "runs")
    world.new_controller()
    world.add_machine("a")
    yield world
    store.close()
