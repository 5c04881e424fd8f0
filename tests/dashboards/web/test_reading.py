"""Kept answers: one question for many readers, never the answer of another user."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lazytrain.dashboards.web.reading import Reads


def test_many_who_ask_at_once_ask_the_service_once() -> None:
    reads, asked, go = Reads(), [], threading.Event()

    def ask() -> int:
        asked.append(1)
        go.wait(5)
        return len(asked)

    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(reads.get, "t", ("queue",), ask, 60.0) for _ in range(8)]
        go.set()
        assert {answer.result() for answer in answers} == {1}
    assert len(asked) == 1


def test_answers_belong_to_a_token_a_question_and_a_moment() -> None:
    now = [0.0]
    reads = Reads(lambda: now[0])
    count = iter(range(100))

    def ask(token: str, *key: str) -> int:
        return reads.get(token, key, lambda: next(count), 1.5)

    assert [ask("a", "queue"), ask("b", "queue"), ask("a", "nodes"), ask("a", "queue")] == [0, 1, 2, 0]
    now[0] = 1.4
    assert ask("a", "queue") == 0
    now[0] = 1.6
    assert ask("a", "queue") == 3
    reads.forget("a")
    assert [ask("a", "queue"), ask("b", "queue")] == [4, 5]


def test_an_error_is_not_kept() -> None:
    reads = Reads()
    with pytest.raises(ValueError, match="down"):
        reads.get("t", ("queue",), lambda: (_ for _ in ()).throw(ValueError("down")))
    assert reads.get("t", ("queue",), lambda: "up") == "up"


def test_what_was_kept_long_ago_makes_room() -> None:
    reads = Reads()
    for number in range(5000):
        reads.get("t", (number,), lambda: 1)
    assert len(reads._kept) <= 2_001
