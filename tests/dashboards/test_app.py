"""The application as a whole: its files, a service that does not answer, what fifty pages cost."""

import re
from typing import Any

import pytest
from starlette.testclient import TestClient

from lazytrain.dashboards.app import STATIC, beside, create_app
from lazytrain.dashboards.pages import overview
from lazytrain.dashboards.web import Reads
from lazytrain.platform.api import InProcess, Origins
from lazytrain.platform.client import Client

Lab = Any
PAGES = ("/", "/queue", "/queue?show=ended", "/nodes", "/plan", "/submit", "/compare")


def test_pages_and_api_share_a_port(lab: Lab) -> None:
    browser = lab.browser()
    assert browser.get("/api/v1/jobs").status_code == 401, "the cookie is worth nothing to the API"
    token = {"Authorization": f"Bearer {lab.tokens['ada']}"}
    assert browser.get("/api/v1/jobs", headers=token).json() == {"jobs": [], "next": None}
    assert browser.get("/", headers=token).status_code == 200


@pytest.mark.parametrize("path", PAGES)
def test_no_page_holds_a_script_or_a_style_or_names_another_host(lab: Lab, path: str) -> None:
    text = lab.browser("root").get(path).text
    assert not re.search(r"<script(?![^>]* src=\"/static/)", text)
    assert not re.search(r"\sstyle=|<style|\son[a-z]+=", text)
    assert not re.search(r"(src|href)=\"(https?:)?//", text)


@pytest.mark.parametrize("path", PAGES)
def test_every_page_has_one_heading_and_every_control_a_name(lab: Lab, path: str) -> None:
    lab.node()
    lab.job()
    text = lab.browser("root").get(path).text
    assert len(re.findall(r"<h1[ >]", text)) == 1
    assert len(set(re.findall(r'\bid="([^"]+)"', text))) == len(re.findall(r'\bid="([^"]+)"', text))
    labelled = set(re.findall(r'<label[^>]* for="([^"]+)"', text))
    for control in re.findall(r"<(?:input|select|textarea)\b[^>]*>", text):
        name = re.search(r'\bid="([^"]+)"', control)
        quiet = 'type="hidden"' in control or 'type="checkbox"' in control or "aria-label=" in control
        assert quiet or (name and name[1] in labelled), control


def test_what_others_wrote_lies_beside_its_licence() -> None:
    assert (STATIC / "htmx.LICENSE.txt").read_text().startswith("Zero-Clause BSD")
    assert 'version:"2.' in (STATIC / "htmx.min.js").read_text()


def test_files_do_not_lead_out_of_their_folder(lab: Lab) -> None:
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd"):
        assert lab.browser().get(path).status_code == 404


def test_a_service_that_does_not_answer(lab: Lab) -> None:
    """On its own in front of an API that is gone: whole pages say so, live parts leave the page as it is."""
    dead = Client("http://127.0.0.1:1", "x")
    app = create_app(lambda token: dead, origins=Origins(), cookie="lazytrain_8470")
    word = app.state.dashboard.sessions.begin("x")
    browser = TestClient(app, base_url="http://127.0.0.1:8470", cookies={"lazytrain_8470": word})
    whole = browser.get("/queue")
    assert whole.status_code == 503
    assert "The service does not answer" in whole.text
    assert '<a href="/queue">Try again</a>' in whole.text
    part = browser.get("/queue?part=rows", headers={"HX-Request": "true"})
    assert (part.status_code, "<html" in part.text) == (503, False)
    assert "x-said" in part.headers
    login = browser.post("/login", data={"token": "y"}, headers={"Origin": "http://127.0.0.1:8470"})
    assert login.status_code == 503
    assert "no service answers" in login.text


def test_fifty_open_pages_ask_the_service_no_more_than_one_does(lab: Lab) -> None:
    lab.node()
    lab.job()
    local = InProcess(lab.api)
    pages = create_app(lambda token: Client("http://127.0.0.1", token, handlers=[local]), cookie="lazytrain_8470")
    pages.state.dashboard.reads = Reads(lambda: 0.0)
    lab.app, asked, listed = beside(lab.api, pages), [], lab.store.jobs.list
    lab.store.jobs.list = lambda *a, **k: (asked.append(k), listed(*a, **k))[1]
    browsers = [lab.browser() for _ in range(5)]
    for _ in range(10):
        for browser in browsers:
            assert browser.get("/queue?part=rows").status_code == 200
    assert len(asked) == 1


def test_a_page_that_fails_is_answered_behind_the_door(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "kinds_of", lambda nodes: 1 / 0)
    browser = lab.browser()
    answer = browser.get("/")
    assert answer.status_code == 500
    assert "this page failed" in answer.text
    assert "ZeroDivisionError" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    part = browser.get("/?part=all", headers={"HX-Request": "true"})
    assert (part.status_code, "<html" in part.text) == (500, False)


def test_a_part_of_no_page(lab: Lab) -> None:
    for path in ("/queue?part=main", "/queue?part=x", "/nodes?part=../x"):
        assert lab.browser().get(path).status_code == 404


def test_the_theme_is_a_word_of_ours(lab: Lab) -> None:
    browser = lab.browser()
    browser.cookies.set("theme", "dark")
    assert '<html lang="en" data-theme="dark">' in browser.get("/").text
    browser.cookies.set("theme", '"><script>')
    assert "data-theme" not in browser.get("/").text
