"""Requests that wait too long, and when to come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.engines import drive, request, tiny_core
from lamina.engine.core import EngineCore
from lamina.engine.failures import error_of
from lamina.engine.patience import Patience
from lamina.errors import EngineOverloaded, LimitExceeded, WaitExceeded
from lamina.types import FinishReason, TokenEvent


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def patient_core(folder: Path, clock: Clock, **options: int) -> EngineCore:
    """Two choices at a time."""
    core = tiny_core(folder / "adapters", max_running=2, **options)
    core._patience = core._intake._patience = Patience(50.0, clock=clock)
    return core


def endings(events: list[TokenEvent]) -> dict[str, TokenEvent]:
    return {event.request_id: event for event in events if event.finish_reason is not None}


def test_who_waited_too_long_is_told_why_and_when_to_come_back(tmp_path: Path, clock: Clock) -> None:
    core = patient_core(tmp_path, clock, num_blocks=8)
    core.submit(request("long", range(3, 100), max_tokens=31))
    core.submit(request("next", range(3, 40), tenant="u", max_tokens=60))
    core.step()
    clock.now += 49.0
    assert endings(core.step()) == {}
    clock.now += 1.0
    ended = endings(core.step())
    assert ended.keys() == {"next"}
    assert ended["next"].finish_reason is FinishReason.ERROR
    assert ended["next"].error is not None
    error = error_of(ended["next"].error)
    assert isinstance(error, WaitExceeded)
    assert (error.limit, error.need, error.have) == (8, 3, 0)
    assert error.decision.startswith("kv-")
    assert error.retry_after_s is not None
    assert error.retry_after_s > 0
    _, rest = drive(core)
    assert rest["long", 0] is FinishReason.LENGTH
    core.close()


def test_all_choices_of_a_request_end(tmp_path: Path, clock: Clock) -> None:
    core = patient_core(tmp_path, clock)
    for name in ("r0", "r1"):
        core.submit(request(name, range(3, 20), max_tokens=40))
    core.step()
    core.submit(request("two", range(3, 20), tenant="u", n=2))
    clock.now += 50.0
    ended = [event for event in core.step() if event.finish_reason is FinishReason.ERROR]
    assert {(event.request_id, event.index) for event in ended} == {("two", 0), ("two", 1)}
    drive(core)
    core.close()


def test_who_has_started_is_left_alone(tmp_path: Path, clock: Clock) -> None:
    """However long it runs, and if it gives way after its first token, however long it waits then."""
    core = patient_core(tmp_path, clock, num_blocks=7)
    for name in ("r0", "r1"):
        core.submit(request(name, range(3, 35), tenant=name, max_tokens=70))
    found: dict[str, TokenEvent] = {}
    while core.has_work():
        found |= endings(core.step())
        clock.now += 20.0
    assert {event.finish_reason for event in found.values()} == {FinishReason.LENGTH}
    assert core.stats().preemptions > 0
    core.close()


def test_the_wait_is_told_once_per_request(tmp_path: Path, clock: Clock) -> None:
    core = patient_core(tmp_path, clock)
    core.submit(request("a", range(3, 20), n=2, max_tokens=3))
    clock.now += 7.0
    waits = []
    while core.has_work():
        waits += [event.queued_s for event in core.step()]
        clock.now += 1.0
    assert [wait for wait in waits if wait is not None] == [7.0]
    core.close()


def test_a_full_queue_says_when_by_the_rate_of_departures(tmp_path: Path, clock: Clock) -> None:
    core = patient_core(tmp_path, clock, max_waiting=4)
    for number in range(60):
        clock.now += 4.0
        drive(core, [request(f"r{number}", range(3, 20), max_tokens=1)])
    for number in range(2):
        core.submit(request(f"t{number}", range(3, 20)))
    with pytest.raises(LimitExceeded) as share:
        core.submit(request("t2", range(3, 20)))
    assert share.value.retry_after_s == pytest.approx(4.0, rel=0.5)
    for number in range(2):
        core.submit(request(f"u{number}", range(3, 20), tenant="u"))
    with pytest.raises(EngineOverloaded) as full:
        core.submit(request("v", range(3, 20), tenant="v"))
    assert full.value.retry_after_s == pytest.approx(4.0, rel=0.5)
    drive(core)
    core.close()


def test_without_a_bound_nothing_is_kept(clock: Clock) -> None:
    patience = Patience(0.0, clock=clock)
    clock.now += 1e9
    assert patience.overdue() == []
