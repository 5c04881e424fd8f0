"""The queue: order, words, pages, and who may change what."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event

from lazytrain.jobs.lifecycle import JobState
from lazytrain.platform.store import Action

Lab = Any


def order(text: str, *names: str) -> list[str]:
    return sorted(names, key=lambda name: text.index(f">{name}</a>"))


def test_who_runs_who_waits_in_which_order_who_is_paused(lab: Lab) -> None:
    lab.job("paused", JobState.PAUSED)
    lab.job("low", queue={"priority": 10}, at=1e9)
    lab.job("late", at=1e9 + 5)
    lab.job("early", at=1e9 + 1)
    lab.job("runs", JobState.RUNNING)
    text = lab.browser().get("/queue").text
    assert order(text, "low", "late", "paused", "runs", "early") == ["runs", "early", "late", "low", "paused"]


def test_why_a_job_waits_and_when_it_is_expected(lab: Lab) -> None:
    job = lab.job(reason="gpu_busy", sentence="both H800 are busy until about 14:20")
    now = time.time()
    lab.store.forecasts.put({job: (now + 3600, now + 7200)}, now)
    text = lab.browser().get("/queue").text
    assert "both H800 are busy until about 14:20" in text
    assert text.count("<time ") == 2


def statements(lab: Lab, user: str) -> int:
    """How often the database is asked for the queue; answers are kept for a moment, each user's apart."""
    asked: list[str] = []
    browser = lab.browser(user)
    engine = lab.store.jobs._db._engine
    event.listen(engine, "before_cursor_execute", lambda *args: asked.append(args[2]))
    assert browser.get("/queue").status_code == 200
    return len(asked)


def test_a_page_of_many_jobs_asks_the_database_no_more_often(new_lab: Callable[..., Lab]) -> None:
    lab = new_lab()
    lab.many(60)
    few = statements(lab, "ada")
    lab.many(600)
    assert 0 < few == statements(lab, "ben")


def test_a_thousand_jobs_are_shown_page_by_page(lab: Lab) -> None:
    lab.many(1000)
    browser = lab.browser()
    first = browser.get("/queue").text
    assert "1 to 50 of 1000" in first
    assert ">job-0000</a>" in first
    assert "job-0050" not in first
    last = browser.get("/queue?page=20").text
    assert ">job-0999</a>" in last
    assert "951 to 1000 of 1000" in last
    assert browser.get("/queue?page=999999").text.count("951 to 1000") == 1
    for nonsense in ("-1", "x", "9" * 40, "%00"):
        assert "1 to 50 of 1000" in browser.get(f"/queue?page={nonsense}").text
    assert 'href="/queue?page=20"' in browser.get("/queue?part=rows").text, "links of a part lead to whole pages"
    part = browser.get("/queue?page=20&part=rows")
    assert ">job-0999</a>" in part.text
    assert "<html" not in part.text


def test_looking_for_jobs(lab: Lab) -> None:
    lab.job("alpha")
    lab.job("beta", user="ben")
    browser = lab.browser("root")
    assert "beta" not in browser.get("/queue?find=ALPH").text
    assert "alpha" not in browser.get("/queue?find=ben").text
    assert "No job is like that." in browser.get("/queue?mine=yes").text


def test_other_peoples_jobs_are_there_without_what_they_are(lab: Lab) -> None:
    lab.job("secret", user="ben", sentence="private words")
    text = lab.browser("ada").get("/queue").text
    assert "somebody's job" in text
    assert "secret" not in text
    assert "private words" not in text
    assert '<form method="post" action="/jobs' not in text


def test_a_viewer_sees_everything_and_can_change_nothing(lab: Lab) -> None:
    job = lab.job("seen", JobState.RUNNING, user="ben")
    browser = lab.browser("vic")
    text = browser.get("/queue").text
    assert "seen" in text
    assert "/stop" not in text
    assert 'href="/plan"' not in text
    assert "New job" not in text
    assert browser.post(f"/jobs/{job}/stop").status_code == 403
    assert lab.store.jobs.requests() == []


@pytest.mark.parametrize(
    ("action", "state", "asked"),
    [
        ("stop", JobState.RUNNING, Action.STOP),
        ("pause", JobState.RUNNING, Action.PAUSE),
        ("resume", JobState.PAUSED, Action.RESUME),
        ("remove", JobState.FAILED, Action.REMOVE),
    ],
)
def test_actions_are_asked_of_the_controller(controlled: Lab, action: str, state: JobState, asked: Action) -> None:
    lab, seen = controlled, []
    ask = lab.store.jobs.ask
    lab.store.jobs.ask = lambda *a, **k: (seen.append(a), ask(*a, **k))[1]
    job = lab.job("mine", state)
    browser = lab.browser("ada")
    text = browser.get("/queue?show=ended" if state.final else "/queue").text
    assert f'hx-post="/jobs/{job}/{action}"' in text
    by_script = browser.post(f"/jobs/{job}/{action}", headers={"HX-Request": "true"})
    assert by_script.status_code == 204
    assert "hx-redirect" in by_script.headers if action == "remove" else by_script.headers["x-said"]
    plain = browser.post(f"/jobs/{job}/{action}", follow_redirects=False)
    assert plain.status_code == 303
    assert [(ids, user, what) for ids, user, what, _ in seen] == [([job], "ada", asked)] * 2


def test_priority_is_a_number_from_0_to_100(controlled: Lab) -> None:
    job = controlled.job()
    browser = controlled.browser()
    assert browser.post(f"/jobs/{job}/priority", data={"priority": "70"}, follow_redirects=False).status_code == 303
    for bad in ("", "101", "-1", "x", "1.5", "٣"):
        answer = browser.post(f"/jobs/{job}/priority", data={"priority": bad}, headers={"HX-Request": "true"})
        assert answer.status_code == 422, bad


def test_why_not_is_said(lab: Lab) -> None:
    job = lab.job("waits")
    ask = lab.store.jobs.ask

    def refused(*arguments: Any, **options: Any) -> Any:
        numbers = ask(*arguments, **options)
        lab.store.jobs.answer_all(dict.fromkeys(numbers, "only a running job can be paused"), 1e9)
        return numbers

    lab.store.jobs.ask = refused
    answer = lab.browser().post(f"/jobs/{job}/pause", headers={"HX-Request": "true"})
    assert answer.status_code == 409
    assert "only a running job can be paused" in answer.text


def test_retry_makes_a_new_job_and_leads_to_it(lab: Lab) -> None:
    job = lab.job("again", JobState.FAILED)
    answer = lab.browser().post(f"/jobs/{job}/retry", follow_redirects=False)
    new = answer.headers["location"].split("?")[0].removeprefix("/jobs/")
    assert lab.store.jobs.get(new).name == "again"
    assert new != job


def test_nobody_changes_jobs_of_others(lab: Lab) -> None:
    job = lab.job("bens", JobState.RUNNING, user="ben")
    for action in ("stop", "pause", "priority"):
        answer = lab.browser("ada").post(f"/jobs/{job}/{action}", data={"priority": "1"})
        assert answer.status_code == 404
    assert lab.browser("ada").post(f"/jobs/{job}/explode").status_code == 422
    assert lab.store.jobs.requests() == []


def test_ended_jobs_page_by_page(lab: Lab) -> None:
    for number in range(60):
        lab.job(f"job-{number:02d}", JobState.STOPPED, at=1e9 + number, sentence="stopped")
    browser = lab.browser()
    first, second = browser.get("/queue?show=ended").text, browser.get("/queue?show=ended&page=2").text
    assert ">job-59</a>" in first
    assert ">job-09</a>" not in first
    assert ">job-09</a>" in second
