"""The breaker: when a server is asked, when it is left alone, and how it is asked again."""

from __future__ import annotations

import pytest

from lamina_kvtier.redis_plane.breaker import Backoff, Breaker, State


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


@pytest.fixture
def breaker(clock: _Clock) -> Breaker:
    return Breaker(3, Backoff(first_s=1.0, limit_s=8.0), clock)


def _open(breaker: Breaker) -> None:
    while not breaker.failed("no"):
        pass


def test_it_opens_after_failures_in_a_row_and_a_success_starts_the_count_anew(breaker: Breaker) -> None:
    assert not breaker.failed("a")
    assert not breaker.failed("b")
    breaker.succeeded()
    assert [breaker.failed("c") for _ in range(3)] == [False, False, True]
    assert breaker.state is State.OPEN
    assert breaker.reason == "c"
    assert not breaker.admit(200.0)


def test_a_connection_lets_one_operation_through_until_its_deadline(breaker: Breaker, clock: _Clock) -> None:
    _open(breaker)
    breaker.connected()
    assert [breaker.admit(101.0) for _ in range(3)] == [True, False, False]
    clock.now = 101.0  # it ended without a word
    assert breaker.admit(102.0)
    breaker.succeeded()
    assert [breaker.admit(103.0) for _ in range(3)] == [True, True, True]


def test_a_trial_that_fails_opens_it_again_for_longer(breaker: Breaker, clock: _Clock) -> None:
    _open(breaker)
    waits = []
    for _ in range(6):
        waits.append(breaker.retry_in())
        clock.now += breaker.retry_in()
        breaker.connected()
        assert breaker.admit(clock.now + 1)
        assert breaker.failed("again")
    limits = [1, 2, 4, 8, 8, 8]
    assert all(limit / 2 <= wait <= limit for wait, limit in zip(waits, limits, strict=True))


def test_success_forgets_how_often_it_opened(breaker: Breaker, clock: _Clock) -> None:
    for _ in range(3):
        _open(breaker)
        clock.now += breaker.retry_in()
        breaker.connected()
        breaker.succeeded()
    _open(breaker)
    assert breaker.retry_in() <= 1.0
    assert breaker.opened == 4


def test_stray_failures_do_not_push_the_next_try_away(breaker: Breaker) -> None:
    _open(breaker)
    before = breaker.retry_in()
    assert not any(breaker.failed("stray") for _ in range(50))
    assert breaker.retry_in() == before


def test_a_late_success_of_another_connection_does_not_close_an_open_breaker(breaker: Breaker) -> None:
    _open(breaker)
    breaker.succeeded()
    assert breaker.state is State.OPEN
