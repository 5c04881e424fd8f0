"""A lab with something of everything, made through the store's public functions: for the browser and for screenshots.

Nothing trains here: files are written as a training process would, and whatever is asked of a job is done at once.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from lazytrain.jobs.lifecycle import JobState
from lazytrain.jobs.model_facts import ModelFacts, UnitFacts
from lazytrain.jobs.policy import LayerPolicy, Policy
from lazytrain.jobs.timeline import Span, Timeline
from lazytrain.platform.admission import Admission, Answer, Found, Question, Way
from lazytrain.platform.api.submission import new_job
from lazytrain.platform.artifacts import JobFiles, write_json
from lazytrain.platform.store import Action, Job, Move
from lazytrain.schedulers.hardware import MEASUREMENT, HardwareProfile, hardware
from lazytrain.schedulers.planner import plan
from lazytrain.schedulers.simulator import predict, simulate

MARKUP = "<img src=x onerror=alert(1)>"
LONG_QUEUE = 1000
_S = JobState


def dashboard_lab() -> ModuleType:
    """The helpers of ``tests/dashboards/conftest.py``, which is no importable module."""
    name = "dashboard_lab"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "conftest.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@cache
def facts() -> ModelFacts:
    """28 layers in the sizes of a model of seven billion parameters, at 8 rows of 1,024 tokens."""
    tokens, hidden, parameters = 8 * 1024, 3584, 233_000_000
    boundary = tokens * hidden * 2

    def unit(name: str, kind: str, **sizes: Any) -> UnitFacts:
        fields: dict[str, Any] = dict.fromkeys(
            ("parameters", "weight_bytes", "output_bytes", "saved_bytes", "saved_matmul_bytes",
             "forward_workspace_bytes", "backward_workspace_bytes"), 0,
        )  # fmt: skip
        return UnitFacts(name=name, kind=kind, variety=kind, **{**fields, "forward_flops": 0.0, **sizes})

    layer = {
        "parameters": parameters, "weight_bytes": 2 * parameters, "forward_flops": 2.0 * parameters * tokens,
        "output_bytes": boundary, "saved_bytes": 14 * boundary, "saved_matmul_bytes": 8 * boundary,
        "forward_workspace_bytes": 4 * boundary, "backward_workspace_bytes": 16 * boundary,
    }  # fmt: skip
    edge = {"parameters": 545_000_000, "weight_bytes": 1_090_000_000}
    return ModelFacts(
        architecture="Qwen2ForCausalLM",
        dtype="bfloat16",
        micro_batch=8,
        sequence_length=1024,
        hidden_size=hidden,
        vocabulary=152_064,
        parameters=28 * parameters + 2 * edge["parameters"],
        side_bytes=1 << 20,
        before=(unit("model.embed", "before", output_bytes=boundary, **edge),),
        layers=tuple(unit(f"model.layers.{i}", "layer", **layer) for i in range(28)),
        after=(unit("model.norm", "after", output_bytes=boundary, parameters=3584, weight_bytes=7168),),
        head=unit("lm_head", "head", forward_flops=2.0 * edge["parameters"] * tokens, **edge),
    )


@cache
def policy() -> Policy:
    """A policy with every home, for `facts`."""
    homes = ["host", *(["gpu", "host", "recompute", "gpu", "nvme", "host", "recompute"] * 4)[:27], "gpu"]
    made = Policy.from_homes(facts(), homes)  # type: ignore[arg-type]
    kept = {5: ("matmuls", "gpu"), 12: ("matmuls", "host"), 26: ("all", "gpu"), 27: ("all", "gpu")}
    layers = [
        LayerPolicy(index=i, internals=kept.get(i, ("none", "gpu"))[0], internals_home=kept.get(i, ("none", "gpu"))[1],
                    resident=i in (0, 1))  # type: ignore[arg-type]
        for i in range(28)
    ]  # fmt: skip
    made = made.model_copy(update={"layers": tuple(layers)})
    return made.model_copy(update={"predicted": predict(made, facts(), hardware("H800"))})


def profile_of(kind: str) -> dict[str, Any]:
    """The profile of a node with such GPUs, as if it had just been measured."""
    return hardware(kind).model_copy(update={"measurement": MEASUREMENT}).model_dump(mode="json")


@cache
def predicted() -> Timeline:
    """The step of `policy` as the simulator expects it."""
    return simulate(policy(), facts(), hardware("H800"))


def measured() -> Timeline:
    """Such a step a little slower, and not quite regular."""
    jitter = random.Random(4)
    at: dict[str, float] = {}
    spans = []
    for span in predicted().spans:
        start_s = max(span.start_s * 1.04, at.get(span.stream, 0.0))
        at[span.stream] = start_s + (span.end_s - span.start_s) * jitter.uniform(1.0, 1.06)
        spans.append(Span(span.op, span.stream, start_s, at[span.stream], span.bytes))
    return Timeline(spans, max(at.values()), {}, dict(predicted().peak_bytes))


@dataclass
class LabPlanner:
    """Plans at once, by a fixed rule unless told otherwise, with `facts` for every model."""

    planner: str = "megatrain"
    found: dict[str, Found] = field(default_factory=dict)

    def submit(self, order: Any) -> None:
        """Answer at once."""
        if isinstance(order, Question):
            self.found[order.job] = Answer(values=self._answer(order))
        else:
            ways = {kind: self._way(kind) for kind in order.profiles}
            self.found[order.job] = Admission(batch=8, steps=1000, ways=ways, limits={})

    def results(self) -> dict[str, Found]:
        """What has been asked since."""
        found, self.found = self.found, {}
        return found

    def close(self) -> None:
        """Nothing to close."""

    def _way(self, kind: str) -> Way:
        option = {"kind": kind, "tokens_per_s": 9000.0, "work_tokens": 8e6, "startup_s": 15.0,
                  "host_bytes": 90 << 30, "nvme_bytes": 0}  # fmt: skip
        return Way(option=option, policy={}, device={})

    def _answer(self, question: Question) -> dict[str, Any]:
        if question.kind == "timeline":
            return predicted().to_dict()
        asked = question.values
        profile = HardwareProfile.model_validate(asked["profile"]) if asked.get("profile") else hardware(asked["gpu"])
        answer = plan(facts(), profile, planner=self.planner, solve_seconds=5.0, host_memory=asked.get("host_memory"))
        timeline = simulate(answer.policy, facts(), profile).to_dict() if answer.policy is not None else None
        about = {"architecture": "Qwen2ForCausalLM", "parameters": facts().parameters, "layers": 28}
        machine = profile.model_dump(mode="json")
        return {**answer.to_dict(), "model": about, "machine": machine, "timeline": timeline}


class MadeLab:
    """Nodes, people and jobs in every state; ``jobs`` gives ids by name."""

    def __init__(self, folder: Path, *, long_queue: bool = True, planner: str = "megatrain") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.lab: Any = dashboard_lab().make_lab(folder)
        self.now = time.time()
        self.jobs: dict[str, str] = {}
        self.store, self.tokens, self.app = self.lab.store, self.lab.tokens, self.lab.app
        instant = LabPlanner(planner)
        self.lab.planner.submit, self.lab.planner.results = instant.submit, instant.results
        self.for_tests = long_queue
        self._obey()
        self._nodes()
        self._running()
        self._waiting()
        self._ended()
        if long_queue:
            self._long_queue()

    def _obey(self) -> None:
        """Do what is asked of jobs as soon as it is asked, in the place of a controller."""
        ask = self.store.jobs.ask

        def obeyed(job_ids: Iterable[str], user: str, action: Action, now: float, **argument: Any) -> Sequence[int]:
            ids = list(job_ids)
            numbers: Sequence[int] = ask(ids, user, action, now, **argument)
            for job_id in ids:
                self._do(self.store.jobs.get(job_id), action, now, argument)
            self.store.jobs.answer_all(dict.fromkeys(numbers, ""), now)
            return numbers

        self.store.jobs.ask = obeyed

    def _do(self, job: Job, action: Action, now: float, argument: dict[str, Any]) -> None:
        moves = {
            (Action.STOP, _S.QUEUED): _S.STOPPED, (Action.STOP, _S.RUNNING): _S.STOPPING,
            (Action.STOP, _S.PAUSED): _S.STOPPED, (Action.PAUSE, _S.RUNNING): _S.PAUSING,
            (Action.RESUME, _S.PAUSED): _S.QUEUED,
        }  # fmt: skip
        if (action, job.state) in moves:
            to = moves[action, job.state]
            self.store.jobs.move(job, Move(to, "asked", f"{to.value.lower()} as asked"), now, self.lab.lease)
        elif action is Action.SET:
            self.store.jobs.annotate(job, now, self.lab.lease, priority=argument["priority"])
        elif action is Action.REMOVE:
            self.store.jobs.annotate(job, now, self.lab.lease, removed_at=now)

    def _nodes(self) -> None:
        h800, small, old = (profile_of(name) for name in ("H800", "RTX3090", "A100-80GB"))
        small["nvme_bytes"] = 0
        lost = {"name": "old-1", "kind": "A100", "gpus": 2.0}
        self.lab.node(profile=old, **lost)
        self.lab.node("gpu-1", gpus=8.0, profile=h800)
        self.lab.node("gpu-2", kind="RTX3090", gpus=4.0, profile=small)
        self.lab.node("gpu-3", gpus=8.0, profile=h800)
        self.lab.node("gpu-4", gpus=4.0, profile={})
        self.store.nodes.drain("gpu-3", True, "new power supply on Tuesday")
        alive = [replace(node, seen_at=self.now) for node in self.store.nodes.list() if node.name != "old-1"]
        self.store.nodes.see(alive, self.now)

    def job(self, name: str, state: JobState, *, node: str = "gpu-1", ago_s: float = 600.0, **options: Any) -> str:
        """A job of the lab; ``name`` may be anything, also what the API would refuse."""
        begun = self.now - ago_s
        made = replace(
            new_job(self.lab.spec(name="x", **options.pop("spec", {})), (), options.pop("user", "ada"), None,
                    self.lab.settings),
            name=name, priority=options.pop("priority", 50),
        )  # fmt: skip
        job, _ = self.store.jobs.create(made, begun)
        self.jobs[name] = job.id
        sentence, reason = options.pop("sentence", "because"), options.pop("reason", "reason")
        ways = dashboard_lab().WAYS[state]
        for place, to in enumerate(ways):
            changes = dict(options) if place == len(ways) - 1 else {}
            if to is _S.STARTING:
                changes |= {"attempt": 1, "node": node, "gpu": str(len(self.jobs) % 8), "claim": f"{job.id}-c"}
            if to is _S.RUNNING:
                changes["started_at"] = begun + 20
            words = sentence if place == len(ways) - 1 else f"on the way to {to.value.lower()}"
            at = self.now - 30 if to.final else begun + 10 * place
            job = self.store.jobs.move(job, Move(to, reason, words), at, self.lab.lease, **changes)
        if not ways:
            self.store.jobs.annotate(job, begun, self.lab.lease, reason=reason, sentence=sentence)
        return job.id

    def train(self, job_id: str, steps: int, total: int, *, start: float = 2.4, speed: float = 1.0) -> None:
        """The files of a training that has taken so many steps."""
        files = self.files(job_id)
        gpu_bytes = 6.1e10 if self.store.jobs.get(job_id).node == "gpu-1" else 1.9e10
        rows = ({**row(k, start, speed), "gpu_bytes": gpu_bytes + 4e9 * min(1.0, k / 20)} for k in range(1, steps + 1))
        files.metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
        self.beat(job_id, steps, total, predicted().step_s * 1.05 / speed)
        files.attempt(1).log.write_text(
            "loading the model\n" + "".join(f"step {k} of {total}: loss {row(k, start, speed)['loss']:.3f}\n"
                                            for k in range(max(1, steps - 300), steps + 1))
        )  # fmt: skip
        policy().save(files.policy)
        write_json(files.timeline, {"step": 3, **measured().to_dict()}, durable=False)
        self.lab.admit(job_id, host_bytes=72 << 30, nvme_bytes=int(policy().predicted.nvme_bytes))  # type: ignore[union-attr]

    def files(self, job_id: str) -> JobFiles:
        """The job's folder."""
        found: JobFiles = self.lab.files(job_id)
        return found

    def beat(self, job_id: str, step: int, total: int, step_s: float) -> None:
        """The training process says how far it is."""
        beat = {"beat": step, "step": step, "total_steps": total, "step_s": step_s}
        write_json(self.files(job_id).attempt(1).beat, beat, durable=False)

    def _running(self) -> None:
        secret = {"output": {"dir": str(self.lab.folder / "out")}}
        sentence = "trains on gpu-1"
        one = self.job("qwen7b-metamath", _S.RUNNING, ago_s=5400, priority=70, sentence=sentence, spec=secret)
        self.train(one, 900, 2400)
        for step in (0, 250, 500, 750):
            folder = self.files(one).checkpoints / f"step-{step:08d}-{step:06d}"
            folder.mkdir(parents=True)
            if step != 500:
                write_json(folder / "manifest.json", {"step": step}, durable=False)
        for name, user, steps, start, speed in (
            ("qwen7b-metamath-lr3e-5", "ada", 700, 2.1, 1.0),
            ("llama8b-chat", "ben", 400, 1.8, 0.9),
            ("dpo-second-try", "ben", 260, 0.7, 0.8),
        ):
            self.train(self.job(name, _S.RUNNING, ago_s=4000, user=user, sentence=sentence), steps, 2000,
                       start=start, speed=speed)  # fmt: skip
        if self.for_tests:
            self._running_for_tests()
        self.job("just-begun", _S.STARTING, ago_s=20, sentence="starts on gpu-1")
        self.train(self.job("paused-for-others", _S.PAUSED, sentence="made room for qwen7b-metamath"), 300, 1000)

    def _running_for_tests(self) -> None:
        """Jobs that are looked at or changed by a test, and would look odd in a picture."""
        self.train(self.job(MARKUP, _S.RUNNING, node="gpu-2", sentence=f"trains {MARKUP}"), 40, 100)
        broken = self.job("loss-goes-wrong", _S.RUNNING, node="gpu-2", user="ben", sentence="trains on gpu-2")
        self.train(broken, 120, 500)
        with self.files(broken).metrics.open("a") as log:
            log.writelines(json.dumps({**row(k, 2.0, 1.0), "loss": None, "grad_norm": None}) + "\n"
                           for k in range(121, 160))  # fmt: skip
        for name in ("to-pause", "to-stop"):
            self.train(self.job(name, _S.RUNNING, node="gpu-2", sentence="trains on gpu-2"), 10, 100)

    def _waiting(self) -> None:
        expected = {}
        for place, (name, why) in enumerate(
            (
                ("gpt-oss-20b-tools", "every H800 is busy: one is free in about 40 minutes"),
                ("evaluation-of-the-week", "others go first to what is free"),
                (
                    "needs-much-memory",
                    "a GPU is free, but the jobs beside it leave 61GiB of host memory, it needs 240GiB",
                ),
                ("to-reprioritise", "every H800 is busy until then"),
            )
        ):
            job_id = self.job(name, _S.QUEUED, ago_s=900 - place, priority=60, sentence=why, reason="gpu_busy",
                              user="ben" if place == 1 else "ada")  # fmt: skip
            start = self.now + 2400 + 1800 * place
            expected[job_id] = (start, start + 5400)
        self.store.forecasts.put(expected, self.now + 3600)

    def _ended(self) -> None:
        done = self.job("finished-last-night", _S.SUCCEEDED, ago_s=40_000, sentence="trained 800 steps, loss 0.41")
        self.train(done, 800, 800)
        outcome = {
            "how": "died", "code": "out_of_memory", "message": "out of memory on host: needed 312GiB, had 240GiB",
            "hint": "lower plan.host_memory or train.batch", "exit_code": -9, "signal": 9, "step": 141, "node": "gpu-2",
        }  # fmt: skip
        failed = self.job("too-greedy", _S.FAILED, node="gpu-2", ago_s=9000, outcome=outcome, reason="out_of_memory",
                          sentence="out of memory on host after 3 attempts")  # fmt: skip
        self.train(failed, 141, 900)
        self.job("does-not-fit", _S.REJECTED, reason="does_not_fit",
                 sentence="needs 873GiB of host memory, has 512GiB")  # fmt: skip
        for name in ("to-retry", "to-remove") if self.for_tests else ():
            self.job(name, _S.STOPPED, sentence="stopped as asked")

    def _long_queue(self) -> None:
        made = new_job(self.lab.spec(name="sweep"), (), "ben", None, self.lab.settings)
        for number in range(LONG_QUEUE):
            job_id = f"j-{number:010x}"
            new = replace(made, id=job_id, name=f"sweep-{number:04d}", priority=10, sentence="others go first",
                          run_dir=f"{made.run_dir}-{number}", body_digest="")  # fmt: skip
            self.store.jobs.create(new, self.now - 100 + number / 100)


def row(step: int, start: float, speed: float) -> dict[str, Any]:
    """A row of a metric log."""
    noise = random.Random(step)
    loss = 0.42 + start * math.exp(-step / 220) + noise.gauss(0, 0.03)
    step_s = predicted().step_s * (1.05 + noise.gauss(0, 0.01)) / speed
    return {
        "step": step, "time": 1.8e9 + step, "loss": loss,
        "learning_rate": 1e-5 * min(1.0, step / 60) * (1 - step / 2600),
        "grad_norm": 0.6 + 2 * math.exp(-step / 90) + abs(noise.gauss(0, 0.08)), "tokens_per_s": 8192 / step_s,
        "step_s": step_s, "predicted_step_s": predicted().step_s, "host_bytes": 7.7e10,
        **({"eval_loss": loss + 0.05} if step % 50 == 0 else {}),
    }  # fmt: skip
