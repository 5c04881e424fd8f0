import threading

import pytest

from lazytrain.platform.cluster.background import Background


def nothing() -> None:
    pass


def test_the_value_and_a_last_look() -> None:
    looks: list[int] = []
    call = Background(lambda: 7, "test")
    assert call.follow(lambda: looks.append(1), every_s=0.01, stop=nothing, patience_s=1) == 7
    assert looks  # what was written just before the end is seen too


def test_the_error_of_the_call_is_raised_here() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        Background(fail, "test").follow(nothing, every_s=0.01, stop=nothing, patience_s=1)


def test_an_interrupt_asks_the_call_to_stop_and_waits_for_it() -> None:
    stop, ended = threading.Event(), threading.Event()

    def work() -> None:
        stop.wait(10)
        ended.set()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Background(work, "test").follow(interrupt, every_s=0.01, stop=stop.set, patience_s=10)
    assert ended.is_set()


def test_patience_ends() -> None:
    release = threading.Event()
    with pytest.raises(ZeroDivisionError):
        Background(lambda: release.wait(10), "test").follow(lambda: 1 // 0, every_s=0.01, stop=nothing, patience_s=0.05)  # type: ignore[arg-type,return-value]
    release.set()
