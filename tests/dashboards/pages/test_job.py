"""The page of one job."""

from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.errors import LazytrainError
from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.admission import Answer
from lazytrain.platform.artifacts import write_json

Lab = Any
TABS = ("training", "plan", "log", "checkpoints", "file", "history")


def page(lab: Lab, job: str, tab: str = "training", user: str = "ada", **query: Any) -> str:
    answer = lab.browser(user).get(f"/jobs/{job}", params={"tab": tab, **query})
    assert answer.status_code == 200, answer.text
    found: str = answer.text
    return found


@pytest.mark.parametrize("state", list(JobState))
def test_every_tab_of_a_job_in_every_state(lab: Lab, state: JobState) -> None:
    job = lab.job("any", state)
    for tab in TABS:
        assert ">any</h1>" in page(lab, job, tab)


def test_how_a_run_goes(lab: Lab) -> None:
    lab.node()
    job = lab.job(state=JobState.RUNNING)
    lab.train(job)
    text = page(lab, job)
    for words in ("20 of 100", "+4.2 %", "predicted 480 ms", "40 s", "<svg", "Loss", "Learning rate", "Gradient norm"):
        assert words in text, words


def test_a_part_is_sent_again_only_when_it_has_changed(lab: Lab) -> None:
    job = lab.job(state=JobState.RUNNING)
    lab.train(job)
    browser = lab.browser()
    for part in ("head", "training"):
        first = browser.get(f"/jobs/{job}?part={part}")
        assert "<html" not in first.text
        again = browser.get(f"/jobs/{job}?part={part}", headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.text) == (304, "")
    lab.train(job, 30)
    other = lab.browser("root").get(f"/jobs/{job}?part=training", headers={"If-None-Match": first.headers["etag"]})
    assert other.status_code == 200
    assert "30 of 100" in other.text


def test_how_a_job_ended_and_what_to_do(lab: Lab) -> None:
    """Case U112."""
    outcome = {"message": "out of memory on host", "hint": "use a smaller batch", "signal": 9, "step": 37}
    job = lab.job("phi", JobState.FAILED, sentence="the host ran out of memory", outcome=outcome)
    lab.train(job)
    text = page(lab, job)
    for words in ("the host ran out of memory", "out of memory on host", "use a smaller batch", ">9<", ">37<"):
        assert words in text, words
    assert "step 20 of 100" in text, "the last lines of its log"
    assert f'hx-post="/jobs/{job}/retry"' in text


def test_the_policy_as_a_map_and_the_step_as_lanes(lab: Lab) -> None:
    lab.node()
    job = lab.job(state=JobState.RUNNING)
    assert "The policy is written when the training begins." in page(lab, job, "plan")
    lab.train(job)
    text = page(lab, job, "plan", user="root")
    for words in ("Policy map", "boundary 2: recomputed", "Working out what was predicted", "host to GPU"):
        assert words in text, words
    lab.planner.answer = Answer(
        values={"step_s": 0.4, "exposed_s": {}, "peak_bytes": {}, "spans": [["forward.0", "compute", 0.1, 0.3, 0]]}
    )
    both = page(lab, job, "plan", user="root", part="timelines")
    assert "predicted" in both
    assert "Working out" not in both
    assert lab.planner.asked[0].kind == "timeline"


def test_a_prediction_that_fails_does_not_hide_what_was_measured(lab: Lab) -> None:
    lab.node()
    job = lab.job(state=JobState.RUNNING)
    lab.train(job)
    lab.planner.answer = LazytrainError("the model is gone")
    text = page(lab, job, "plan", part="timelines")
    assert "There is no prediction to show: the model is gone" in text
    assert "<svg" in text


def test_the_log_its_end_a_search_in_it_and_all_of_it(lab: Lab) -> None:
    """Case U111."""
    job = lab.job(state=JobState.SUCCEEDED)
    log = lab.files(job).attempt(1).log
    log.parent.mkdir(parents=True)
    lines = [f"line {k} of many, mit Umlaut ü" for k in range(100_000)]
    log.write_text("\n".join(lines) + "\nthe very end\n")
    text = page(lab, job, "log")
    assert "the very end" in text
    assert "line 5 of" not in text
    assert len(text) < 200_000
    found = page(lab, job, "log", find="LINE 777 of")
    assert "   778</span>  line 777 of" in found
    assert "1 line with" in found
    many = page(lab, job, "log", find="of many")
    assert "200 lines with" in many
    assert "the first ones" in many
    whole = lab.browser().get(f"/jobs/{job}/log.txt")
    assert whole.text == log.read_text()
    assert whole.headers["content-disposition"] == f'attachment; filename="{job}-1.txt"'
    assert whole.headers["content-type"].startswith("text/plain")


def test_checkpoints_newest_first_with_the_command_that_exports(lab: Lab) -> None:
    job = lab.job(state=JobState.RUNNING)
    folder = lab.files(job).checkpoints
    for step in (100, 200, 300):
        (folder / f"step-{step:08d}-{step:06d}").mkdir(parents=True)
    for step in (100, 200):
        write_json(folder / f"step-{step:08d}-{step:06d}" / "manifest.json", {"step": step})
    text = page(lab, job, "checkpoints")
    assert text.index("step-00000300") < text.index("step-00000200") < text.index("step-00000100")
    assert text.count(">incomplete<") == 1
    assert f"lazytrain export {lab.store.jobs.get(job).run_dir} --out tiny" in text
    script = lab.browser().get(f"/jobs/{job}/export.sh?step=200")
    assert script.text == f"#!/bin/sh\nlazytrain export {lab.store.jobs.get(job).run_dir} --out tiny --checkpoint 200\n"
    assert lab.browser().get(f"/jobs/{job}/export.sh?step=1;rm").text.endswith("--out tiny\n")


def test_the_job_file_without_secrets(lab: Lab) -> None:
    job = lab.job(data={"train": [{"path": str(lab.folder / "hf_abcdefghijklmnopqrstuvwxyz")}]})
    text = page(lab, job, "file")
    assert "learning_rate" in text
    assert "abcdefghijklmnop" not in text


def test_what_happened_newest_first(lab: Lab) -> None:
    job = lab.job(state=JobState.RUNNING, sentence="as told")
    text = page(lab, job, "history")
    assert text.index(">running<") < text.index(">starting<") < text.index(">queued<")


def test_the_run_in_mlflow(new_lab: Any) -> None:
    lab = new_lab(mlflow_pages="https://mlflow.example.org/")
    job = lab.job(state=JobState.RUNNING)
    assert "MLflow" not in page(lab, job)
    write_json(lab.files(job).mlflow, {"run_id": "0123abcd"})
    assert 'href="https://mlflow.example.org/#/runs/0123abcd"' in page(lab, job, user="root")


def test_nobody_looks_at_jobs_of_others(lab: Lab) -> None:
    job = lab.job("secret", JobState.RUNNING)
    lab.train(job)
    browser = lab.browser("ben")
    for path in (*(f"?tab={tab}" for tab in TABS), "/log.txt", "/export.sh"):
        answer = browser.get(f"/jobs/{job}{path}")
        assert answer.status_code == 404, path
        assert "secret" not in answer.text


@pytest.mark.parametrize("bad", ["j-0123456789", "..%2F..%2Fetc%2Fpasswd", "j-x", "a" * 5000, "%00"])
def test_a_job_that_is_not_there(lab: Lab, bad: str) -> None:
    """Case U119."""
    answer = lab.browser("root").get(f"/jobs/{bad}")
    assert answer.status_code in (404, 422)
    assert "root:" not in answer.text


MARKUP = "<img src=x onerror=alert(1)>"


def test_markup_in_what_people_write_is_text(lab: Lab) -> None:
    """Case U121: names are restricted; everything else that reaches a page is escaped."""
    lab.node()
    job = lab.job("plain", JobState.FAILED, sentence=MARKUP, outcome={"message": MARKUP, "hint": MARKUP})
    lab.train(job)
    files = lab.files(job)
    files.attempt(1).log.write_text(f"{MARKUP}\n")
    with files.metrics.open("a") as log:
        log.write(
            '{"step": 21, "time": 1, "<img src=x onerror=alert(1)>": 1, "tokens_per_s": 1, "loss": "' + MARKUP + '"}\n'
        )
    write_json(
        files.timeline,
        {"step_s": 1.0, "exposed_s": {MARKUP: 1.0}, "peak_bytes": {}, "spans": [[MARKUP, "compute", 0, 1, 0]]},
    )
    lab.store.nodes.drain("a", True, MARKUP)
    browser = lab.browser("root")
    paths = ["/", "/queue", "/queue?show=ended", f"/queue?find={MARKUP}", "/nodes", f"/compare?job={job}&find={MARKUP}"]
    paths += [f"/jobs/{job}?tab={tab}" for tab in TABS] + [
        f"/jobs/{job}?tab=log&find=<img",
        f"/plan?model={MARKUP}&ask=yes",
    ]
    for path in paths:
        text = browser.get(path).text
        assert "<img" not in text, path
    shown = [path for path in paths if "&lt;img" in browser.get(path).text]
    assert len(shown) >= 8


def test_a_path_with_markup_is_text_in_the_job_file(lab: Lab, tmp_path: Path) -> None:
    job = lab.job(data={"train": [{"path": f"{lab.folder}/<b>rows</b>"}]})
    text = page(lab, job, "file")
    assert "<b>rows" not in text
    assert "&lt;b&gt;rows" in text
