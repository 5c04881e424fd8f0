"""Sessions: what the browser holds is not the token, and old ones are over."""

from lazytrain.dashboards.web.sessions import IDLE_S, Sessions


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_word_stands_for_the_token_until_the_session_ends() -> None:
    sessions = Sessions()
    one, two = sessions.begin("secret"), sessions.begin("secret")
    assert one != two
    assert "secret" not in one
    found = sessions.find(one)
    assert found is not None
    assert found.token == "secret"
    sessions.end(one)
    assert sessions.find(one) is None
    assert sessions.find(two) is not None
    assert sessions.find("") is None
    assert sessions.find("secret") is None


def test_a_session_that_nobody_uses_is_over() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    word = sessions.begin("secret")
    clock.now = IDLE_S - 1
    assert sessions.find(word) is not None
    clock.now += IDLE_S - 1
    assert sessions.find(word) is not None
    clock.now += IDLE_S + 1
    assert sessions.find(word) is None


def test_old_sessions_do_not_pile_up() -> None:
    clock = Clock()
    sessions = Sessions(clock)
    for _ in range(20):
        sessions.begin("secret")
        clock.now += IDLE_S + 1
    assert len(sessions._known) == 1
