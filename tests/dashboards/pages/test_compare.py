"""Runs over each other."""

from typing import Any

from lazytrain.jobs.lifecycle import JobState

Lab = Any


def test_metrics_and_what_differs(lab: Lab) -> None:
    one = lab.job("one", JobState.RUNNING, train={"learning_rate": 1e-5})
    two = lab.job("two", JobState.SUCCEEDED, train={"learning_rate": 3e-5})
    for job in (one, two):
        lab.train(job)
    text = lab.browser().get(f"/compare?job={one}&job={two}").text
    assert text.count("<figure") >= 4
    assert "train.learning_rate" in text
    assert "3e-05" in text
    assert "train.epochs" not in text.split("What differs")[1]
    part = lab.browser().get(f"/compare?job={one}&job={two}&part=all").text
    assert "<html" not in part
    assert f"job={one}&amp;job={two}" in text, "a live part asks for the same runs"


def test_runs_of_one_name_are_told_apart(lab: Lab) -> None:
    jobs = [lab.job("same", JobState.RUNNING) for _ in range(2)]
    for job in jobs:
        lab.train(job)
    text = lab.browser().get(f"/compare?job={jobs[0]}&job={jobs[1]}").text
    assert f"same ({jobs[0]})" in text
    assert "Nothing but names and folders." in text


def test_choosing(lab: Lab) -> None:
    lab.job("ran", JobState.RUNNING)
    lab.job("theirs", JobState.RUNNING, user="ben")
    lab.job("waits")
    text = lab.browser("ada").get("/compare").text
    assert "ran" in text
    assert "theirs" not in text
    assert "waits" not in text


def test_too_many_or_others(lab: Lab) -> None:
    theirs = lab.job("theirs", JobState.RUNNING, user="ben")
    browser = lab.browser("ada")
    assert browser.get(f"/compare?job={theirs}").status_code == 404
    assert browser.get("/compare?" + "&".join(f"job=j-{n:010x}" for n in range(9))).status_code == 422
