"""What every request passes: our own names, our own pages, and no script but ours."""

from typing import Any

import pytest

Lab = Any
CHANGES = ("/logout", "/jobs/{job}/stop", "/jobs/{job}/priority", "/nodes/a/drain", "/nodes/a/measure", "/submit")


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.test"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:9999"}, {"Host": "evil.test"}],
)
def test_a_foreign_page_changes_nothing(lab: Lab, headers: dict[str, str]) -> None:
    lab.node()
    job = lab.job()
    browser = lab.browser("root")
    for path in CHANGES:
        answer = browser.post(path.format(job=job), headers=headers, data={"do": "submit", "priority": "1"})
        assert answer.status_code == 403, path
    assert lab.store.jobs.requests() == []
    assert not lab.store.nodes.get("a").drained
    assert browser.get("/").status_code == 200, "still signed in"


def test_a_change_says_where_it_comes_from(lab: Lab) -> None:
    browser = lab.browser("root")
    del browser.headers["Origin"]
    assert browser.post("/logout").status_code == 403
    assert browser.get("/queue").status_code == 200


def test_another_name_for_our_address_is_refused_for_reading_too(lab: Lab) -> None:
    assert lab.browser().get("/queue", headers={"Host": "evil.test"}).status_code == 403


@pytest.mark.parametrize("path", ["/", "/login", "/queue", "/nothing", "/static/app.js", "/static/plots.css"])
def test_no_answer_lets_a_foreign_script_or_a_frame_in(lab: Lab, path: str) -> None:
    headers = lab.browser().get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"


def test_pages_are_not_kept_by_the_browser_and_files_are_asked_about(lab: Lab) -> None:
    browser = lab.browser()
    assert browser.get("/queue").headers["cache-control"] == "no-store"
    assert browser.get("/static/app.css").headers["cache-control"] == "no-cache"
