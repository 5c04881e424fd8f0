"""Signing in and out."""

from typing import Any

import pytest

Lab = Any


def test_a_right_token_opens_a_session_that_scripts_and_other_sites_cannot_use(lab: Lab) -> None:
    answer = lab.stranger().post("/login", data={"token": lab.tokens["ada"]}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("lazytrain_8470=")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert lab.tokens["ada"] not in cookie
    assert "Secure" not in cookie


def test_behind_tls_the_cookie_travels_over_tls_alone(new_lab: Any) -> None:
    lab = new_lab(api_names=("gpu.example.org",))
    answer = lab.stranger().post("/login", data={"token": lab.tokens["ada"]}, follow_redirects=False)
    assert "Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize("token", ["", "wrong", "x" * 5000, "a b\r\nc: d", "ö"])
def test_a_wrong_token_opens_nothing_and_is_not_shown_again(lab: Lab, token: str) -> None:
    browser = lab.stranger()
    answer = browser.post("/login", data={"token": token})
    assert answer.status_code == 401
    assert "This token is not valid." in answer.text
    assert "set-cookie" not in answer.headers
    assert not token or f'value="{token}"' not in answer.text
    assert browser.get("/queue", follow_redirects=False).headers["location"] == "/login?next=%2Fqueue"


def test_guessing_is_slowed_down(lab: Lab) -> None:
    browser = lab.stranger()
    codes = {browser.post("/login", data={"token": f"guess{n}"}).status_code for n in range(15)}
    assert codes == {401, 429}
    assert lab.browser("ada").get("/").status_code == 200


@pytest.mark.parametrize(
    "path", ["/", "/queue?page=2", "/jobs/j-0123456789", "/nodes", "/plan", "/submit", "/compare", "/x"]
)
def test_strangers_see_nothing_and_come_back_to_where_they_were_going(lab: Lab, path: str) -> None:
    browser = lab.stranger()
    away = browser.get(path, follow_redirects=False)
    assert away.status_code == 303
    assert away.headers["location"].startswith("/login")
    then = browser.get(away.headers["location"])
    back = browser.post("/login", data={"token": lab.tokens["ada"], "next": path}, follow_redirects=False)
    assert back.headers["location"] == path
    assert then.status_code == 200


@pytest.mark.parametrize(
    "then", ["//evil.test", "https://evil.test", "/\\evil.test", "\\evil", "/a\nb", "javascript:1"]
)
def test_signing_in_leads_nowhere_else(lab: Lab, then: str) -> None:
    data = {"token": lab.tokens["ada"], "next": then}
    assert lab.stranger().post("/login", data=data, follow_redirects=False).headers["location"] == "/"


def test_signing_out_ends_the_session_for_whoever_holds_its_word(lab: Lab) -> None:
    browser = lab.browser()
    word = browser.cookies["lazytrain_8470"]
    assert browser.post("/logout", follow_redirects=False).status_code == 303
    browser.cookies.set("lazytrain_8470", word)
    assert browser.get("/", follow_redirects=False).headers["location"] == "/login"


def test_a_token_that_is_replaced_ends_its_sessions(lab: Lab) -> None:
    browser = lab.browser("ada")
    lab.store.people.revoke_tokens("ada", now=0.0)
    assert browser.get("/queue", follow_redirects=False).headers["location"].startswith("/login")
    script = browser.get("/queue?part=rows", headers={"HX-Request": "true"}, follow_redirects=False)
    assert (script.status_code, script.headers["hx-refresh"]) == (401, "true")


def test_the_token_itself_is_no_session(lab: Lab) -> None:
    browser = lab.stranger()
    browser.cookies.set("lazytrain_8470", lab.tokens["root"])
    assert browser.get("/", follow_redirects=False).status_code == 303
