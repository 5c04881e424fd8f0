"""Everything that can be done on the pages, done with mouse and keyboard, and seen in the store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lazytrain.jobs.errors import Unreachable

Open = Callable[..., Any]
Site = Any


def stored(site: Site, name: str) -> Any:
    """The job as the store has it."""
    return site.made.store.jobs.get(site.made.jobs[name])


def said(someone: Any, words: str) -> None:
    """Wait until the page says so."""
    someone.page.locator("#said").get_by_text(words).wait_for()


def test_signing_in_and_out(site: Site, person: Open) -> None:
    someone = person(None)
    someone.allowed = {401}
    someone.page.goto(f"{site.url}/queue?find=sweep-0007")
    someone.page.fill("#token", "wrong")
    someone.page.keyboard.press("Enter")
    someone.page.get_by_text("This token is not valid").wait_for()
    assert "/login" in someone.page.url
    someone.page.fill("#token", site.made.tokens["vic"])
    someone.page.keyboard.press("Enter")
    someone.page.wait_for_url("**/queue?find=sweep-0007")
    assert site.made.tokens["vic"] not in someone.page.content()
    assert "token" not in json.dumps(someone.page.context.cookies()).lower()
    someone.page.get_by_role("button", name="Sign out").click()
    someone.page.wait_for_url("**/login")
    someone.page.goto(f"{site.url}/nodes")
    assert "/login" in someone.page.url


def test_roles_decide_what_is_shown(site: Site, person: Open) -> None:
    viewer, other, admin = person("vic"), person("ben"), person("root")
    other.allowed = {404}
    job = site.job("qwen7b-metamath")
    for someone in (viewer, admin):
        someone.go(job)
    assert viewer.page.locator("main form[method=post]").count() == 0
    assert admin.page.get_by_role("button", name="Stop job qwen7b-metamath").count() == 1
    assert other.page.goto(site.url + job).status == 404
    other.go("/nodes")
    assert other.page.get_by_role("button", name="Drain").count() == 0


@pytest.mark.parametrize(
    ("name", "button", "state"),
    [("to-stop", "Stop", "STOPPING"), ("to-pause", "Pause", "PAUSING"), ("paused-for-others", "Resume", "QUEUED")],
)
def test_a_job_is_told_to(site: Site, person: Open, name: str, button: str, state: str) -> None:
    someone = person()
    someone.go(site.job(name))
    someone.page.get_by_role("button", name=f"{button} job {name}").click()
    someone.page.locator("#part-head .state", has_text=state.lower()).wait_for()
    assert stored(site, name).state.value == state


def test_priority_is_changed_in_the_queue(site: Site, person: Open) -> None:
    someone = person()
    someone.go("/queue?find=to-reprioritise")
    someone.page.get_by_label("Priority of to-reprioritise", exact=True).fill("91")
    someone.page.get_by_role("button", name="Set the priority of to-reprioritise").click()
    said(someone, "The priority is changed.")
    assert stored(site, "to-reprioritise").priority == 91


def test_retry_and_remove(site: Site, person: Open) -> None:
    someone = person()
    someone.go(site.job("to-retry"))
    before = site.made.store.jobs.count()
    someone.page.get_by_role("button", name="Retry job to-retry").click()
    before_id = site.made.jobs["to-retry"]
    someone.page.wait_for_url(lambda url: "/jobs/j-" in url and before_id not in url)
    assert sum(site.made.store.jobs.count().values()) == sum(before.values()) + 1
    someone.go("/queue?show=ended")
    someone.page.get_by_role("button", name="Remove job to-remove").click()
    someone.page.get_by_role("link", name="to-remove").wait_for(state="detached")
    assert stored(site, "to-remove").removed_at is not None


def test_a_node_is_drained_and_taken_back(site: Site, person: Open) -> None:
    someone = person("root")
    someone.go("/nodes")
    someone.page.get_by_label("Why gpu-2 is drained").fill("new <b>disk</b>")
    someone.page.get_by_role("button", name="Drain gpu-2: no new jobs").click()
    someone.page.locator("#node-gpu-2").get_by_text("new <b>disk</b>").wait_for()
    assert site.made.store.nodes.get("gpu-2").drained
    someone.page.get_by_role("button", name="Take back gpu-2 into service").click()
    someone.page.get_by_role("button", name="Drain gpu-2: no new jobs").wait_for()
    assert not site.made.store.nodes.get("gpu-2").drained
    profile = site.made.store.nodes.get("gpu-2").profile
    someone.page.get_by_role("button", name="Measure again gpu-2").click()
    said(someone, "gpu-2 is measured as soon as nothing runs there")
    assert site.made.store.nodes.get("gpu-2").profile == {}
    site.made.store.nodes.set_profile("gpu-2", profile)


def test_planning_shows_map_timeline_and_comparison(site: Site, person: Open) -> None:
    someone = person()
    someone.go("/plan")
    someone.page.fill("#batch", "16")
    someone.page.get_by_role("button", name="Plan", exact=True).click()
    someone.page.locator("#answer .plot-timeline").wait_for()
    assert someone.page.locator("#answer .plot-map .plot-tile").count() == 57
    assert "this plan" in someone.page.inner_text("#answer")
    someone.page.get_by_role("link", name="Make a job of it").click()
    someone.page.wait_for_url("**/submit?**")
    assert "qwen2.5-7b" in someone.page.input_value("#text")


def test_a_job_is_written_planned_and_submitted(site: Site, person: Open) -> None:
    someone = person()
    folder = site.made.lab.folder
    someone.go("/submit")
    page = someone.page
    for name, value in (("name", "from-the-page"), ("model.path", f"{folder}/model")):
        page.locator(f'[id="f-{name}"]').fill(value)
    page.locator('[id="f-data.train.0.path"]').fill(f"{folder}/rows.jsonl")
    page.keyboard.press("Tab")
    page.locator("#text", has_text="rows.jsonl").wait_for()
    page.get_by_role("button", name="See where it fits").click()
    page.locator("#fits").get_by_text("It fits").wait_for(timeout=120_000)  # torch is loaded first
    page.get_by_role("button", name="Submit", exact=True).click()
    page.wait_for_url("**/jobs/j-*")
    assert page.inner_text("h1") == "from-the-page"


def test_a_file_of_another_trainer_is_read_and_a_wrong_one_refused(site: Site, person: Open) -> None:
    someone = person()
    someone.go("/submit")
    page = someone.page
    page.fill("#text", "model_name_or_path: org/model\nstage: sft\nfinetuning_type: full\ndataset: alpaca_en\n"
                       "template: qwen\ncutoff_len: 2048\noutput_dir: out\n")  # fmt: skip
    page.get_by_role("button", name="Read the text into the fields").click()
    page.get_by_text("This was a file of").wait_for()
    assert page.locator('[id="f-model.path"]').input_value() == "org/model"
    page.fill("#text", "model: {path: x}\ntrian: {}\n")
    page.get_by_role("button", name="Read the text into the fields").click()
    page.locator("#wrong").wait_for()
    assert "trian" in page.inner_text("#wrong")


def test_runs_are_compared(site: Site, person: Open) -> None:
    someone = person("root")
    someone.go("/compare?find=qwen7b")
    someone.page.get_by_label("qwen7b-metamath ada").check()
    someone.page.get_by_label("qwen7b-metamath-lr3e-5").check()
    someone.page.get_by_role("button", name="Compare").click()
    someone.page.locator(".plot-series").first.wait_for()
    assert someone.page.locator(".plot-series").first.locator("path.plot-line").count() == 2


def test_the_log_is_searched_and_downloaded(site: Site, person: Open) -> None:
    someone = person()
    someone.go(f"{site.job('qwen7b-metamath')}?tab=log")
    someone.page.fill("#find", "step 777 of")
    someone.page.get_by_role("button", name="Show").click()
    someone.page.get_by_text("1 line with").wait_for()
    with someone.page.expect_download() as waiting:
        someone.page.get_by_role("link", name="All of it as a file").click()
    assert "step 900 of 2400" in Path(waiting.value.path()).read_text()
    someone.go(f"{site.job('qwen7b-metamath')}?tab=checkpoints")
    with someone.page.expect_download() as waiting:
        someone.page.get_by_role("link", name="Download the export command of step 750").click()
    assert "--checkpoint 750" in Path(waiting.value.path()).read_text()


def test_a_timeline_is_zoomed_by_buttons_and_keys(site: Site, person: Open) -> None:
    someone = person()
    someone.go(f"{site.job('qwen7b-metamath')}?tab=plan")
    page = someone.page
    page.locator("#timelines .plot-track").nth(8).wait_for()  # predicted and measured

    def shown() -> list[float]:
        box = page.locator("#timelines .plot-track").first.get_attribute("viewBox").split()
        return [float(box[0]), float(box[2])]

    assert shown() == [0, 1000]
    page.get_by_role("button", name="Zoom in").click()
    assert shown() == [250, 500]
    last = page.locator("#timelines .plot-time").last.text_content()
    page.locator("#timelines .plot-scroll").focus()
    page.keyboard.press("ArrowRight")
    assert shown() == [375, 500] and page.locator("#timelines .plot-time").last.text_content() != last
    page.keyboard.press("0")
    assert shown() == [0, 1000]


def test_the_page_follows_the_job(site: Site, person: Open) -> None:
    someone = person("root")
    job_id = site.made.jobs["llama8b-chat"]
    someone.go(site.job("llama8b-chat"))
    someone.page.get_by_text("400 of 2000").locator("visible=true").first.wait_for()
    site.made.train(job_id, 450, 2000)
    someone.page.get_by_text("450 of 2000").locator("visible=true").first.wait_for()
    site.made.train(job_id, 400, 2000)


def test_a_dead_service_is_said_and_the_page_recovers(
    site: Site, person: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    someone = person()
    someone.allowed = {503}
    someone.go("/queue")

    def dead(*arguments: Any) -> Any:
        raise Unreachable("the database does not answer")

    monkeypatch.setattr(site.made.store.people, "who", dead)
    someone.page.locator("#banner").get_by_text("does not answer").wait_for()
    assert someone.page.locator("#part-rows tbody tr").count() == 50  # what was known is still there
    assert someone.page.goto(f"{site.url}/nodes").status == 503
    someone.page.get_by_text("Running jobs do not depend on this page").wait_for()
    monkeypatch.undo()
    someone.go("/queue")
    assert someone.page.locator("#banner").is_hidden()


def test_light_and_dark_are_chosen_and_kept(site: Site, person: Open) -> None:
    someone = person()
    someone.go("/")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = someone.page.evaluate(colour)
    someone.page.get_by_role("button", name="Light or dark").click()
    dark = someone.page.evaluate(colour)
    assert dark != light
    someone.go("/nodes")
    assert someone.page.evaluate(colour) == dark
