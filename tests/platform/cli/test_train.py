import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.policy import Policy
from lazytrain.platform.admission import Answer, Question
from lazytrain.platform.cli import train as command
from lazytrain.platform.cli.app import run
from lazytrain.platform.cli.job import Job
from lazytrain.platform.cli.signals import stop_on_signal
from lazytrain.platform.settings import Settings

pytestmark = pytest.mark.usefixtures("quick")
SHORT = ["--set", "train.max_steps=2", "--set", "train.batch=4", "--set", "evaluate.limit=2"]


def trained(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert run(["train", *arguments, "--json"]) == code
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_plans_and_trains(tiny_job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = trained([str(tiny_job), *SHORT, "--device", "emulated:RTX3090"], capsys)
    assert (answer["status"], answer["steps"]) == ("done", 2)
    assert answer["predicted_step_s"] > 0
    policy = Policy.load(Path(answer["run_dir"]) / "policy.json")
    assert policy.micro_batch == 4
    assert policy.certificate is not None
    assert policy.certificate.planner == "paper"


def test_a_given_policy_is_used(tiny_job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = trained([str(tiny_job), *SHORT, "--device", "cpu"], capsys)
    given = Policy.load(Path(first["run_dir"]) / "policy.json")
    homes = tuple(b.model_copy(update={"home": "host"}) for b in given.boundaries[:-1])
    path = tmp_path / "given.json"
    given.model_copy(update={"boundaries": (*homes, given.boundaries[-1])}).save(path)
    elsewhere = ["--set", f"output.dir={tmp_path / 'second'}", "--policy", str(path)]
    second = trained([str(tiny_job), *SHORT, "--device", "cpu", *elsewhere], capsys)
    assert set(Policy.load(Path(second["run_dir"]) / "policy.json").homes[:-1]) == {"host"}


def test_a_run_that_goes_on_keeps_its_policy(tiny_job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tiny_job.parent / "train.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:16]))  # fewer batches to plan
    arguments = [str(tiny_job), "--device", "cpu", "--set", "train.batch=auto", "--set", "evaluate.limit=2"]
    arguments += ["--set", "train.max_steps=2"]
    first = trained(arguments, capsys)
    path = Path(first["run_dir"]) / "policy.json"
    before = path.read_bytes()
    again = trained(arguments, capsys)
    assert path.read_bytes() == before
    assert again["steps"] == first["steps"]


def test_for_a_person(tiny_job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", str(tiny_job), *SHORT, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    for words in ("done after 2 steps", "boundaries", "held-out exact match", "tokens/s", "peak device memory"):
        assert words in shown


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--set", "train.bach=4"], 2, "did you mean batch"),
        (["--set", "train.batch=4", "--device", "tpu"], 2, "tpu"),
        (["--set", "model.path=/nowhere/at/all"], 2, "/nowhere/at/all"),
        (["--set", "train.batch=4", "--set", "plan.host_memory=1KB"], 3, "host_memory"),
        (["--policy", "none.json"], 2, "none.json"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    tiny_job: Path, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = trained([str(tiny_job), *arguments], capsys, code)["error"]
    assert words in error["message"]


def test_the_first_signal_is_a_request_and_the_second_an_interrupt() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signal() as request:
        assert not request.requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.requested()
        assert request.number == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stopped_run_can_go_on(
    tiny_job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = command._train

    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(command, "_train", interrupted)
    stopped = trained([str(tiny_job), *SHORT, "--device", "cpu"], capsys, code=130)
    assert (stopped["status"], stopped["steps"], stopped["loss"]) == ("stopped", 0, None)
    monkeypatch.setattr(command, "_train", original)
    done = trained([str(tiny_job), *SHORT, "--device", "cpu"], capsys)
    assert (done["status"], done["steps"]) == ("done", 2)


def test_a_run_takes_up_the_policy_that_it_is_planned_again_with(
    tiny_job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third to fifth steps are recorded and asked about; the answer comes after the sixth and is followed then."""
    asked: list[Question] = []
    seconds = {"measured_s": 1.05, "predicted_s": 1.0, "calibrated_s": 1.04}
    calibration = {"steps": 3, **seconds, "sentence": "5.0% more than was predicted"}

    class OneSlotMore:
        def __init__(self, log_file: Path, *, niceness: int) -> None:
            assert niceness > 0

        def submit(self, question: Question) -> None:
            asked.append(question)

        def results(self) -> dict[str, Answer]:
            policy = {**asked[-1].values["policy"], "weight_slots": 7}
            values = {"words": "slower", "policy": policy, "tokens_per_s": 1.0, "calibration": calibration}
            return {asked[-1].job: Answer(values=values)}

        def close(self) -> None:
            pass

    monkeypatch.setattr("lazytrain.platform.admission.PlannerProcess", OneSlotMore)
    monkeypatch.setattr("lazytrain.platform.cli.replanning.ends_soon", lambda steps_left, step_s: False)
    arguments = [str(tiny_job), "--device", "cpu", "--set", "train.batch=4", "--set", "train.max_steps=7"]
    arguments += ["--set", "plan.planner=every_layer", "--set", "evaluate.limit=1"]
    assert run(["train", *arguments]) == 0
    (question,) = asked
    assert question.values["profile"]["host_memory_bytes"] > 0
    steps = Path(question.values["steps"])
    assert len(json.loads(steps.read_text())["steps"]) == 3
    assert Policy.load(steps.with_name("policy.json")).weight_slots == 7
    told = capsys.readouterr().out
    assert f"in {steps.parent}" in told and "5.0% more than was predicted" in told


def test_an_automatic_batch_is_the_one_with_the_best_prediction(tiny_job: Path) -> None:
    from lazytrain.jobs.spec import load_spec

    job = Job.open(load_spec(tiny_job), "emulated:RTX3090", Settings())
    assert job.plan().policy is not None
    assert job.plan().policy.micro_batch > 8  # type: ignore[union-attr]
