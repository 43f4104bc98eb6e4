"""When the engine's loop sleeps, for how long, and what it does in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from lamina.engine.server import EngineServer
from lamina.engine.wire import FromCore, Submit, ToCore
from support.fake_engine import FakeCore, request
from support.fixed_rates import HandClock


@dataclass
class Quiet:
    """A link over which these messages come at once, and then none; sleeping is only noted. Stops the server."""

    clock: HandClock
    messages: list[ToCore] = field(default_factory=list)
    naps: list[float | None] = field(default_factory=list)
    nights: int = 20  # it sleeps so often before it is stopped
    server: EngineServer | None = None

    def send(self, message: FromCore) -> None: ...

    def receive(self) -> ToCore | None:
        return self.messages.pop(0) if self.messages else None

    def wait(self, seconds: float | None) -> bool:
        self.naps.append(seconds)
        self.clock.now += 3600.0 if seconds is None else seconds
        if len(self.naps) == self.nights:
            assert self.server is not None
            self.server.stop()
        return False


class Beats:
    """Notes whether the loop slept as one that works."""

    def __init__(self) -> None:
        self.said: list[bool] = []

    def turned(self, *, busy: bool) -> None:
        self.said.append(busy)


class Restless(FakeCore):
    """Has something to go on with for a while, between requests."""

    def __init__(self, pauses: Iterator[float | None], clock: HandClock) -> None:
        super().__init__()
        self.pauses, self.clock = pauses, clock
        self.ticks = 0
        self.checks: list[float] = []

    def idle(self) -> float | None:
        self.ticks += 1
        return next(self.pauses, None)

    def check_integrity(self) -> None:
        self.checks.append(self.clock.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    made = HandClock()
    monkeypatch.setattr("lamina.engine.server.time.monotonic", made)
    return made


def run(clock: HandClock, pauses: list[float | None], messages: list[ToCore], nights: int) -> tuple[Restless, Quiet]:
    link, beats, core = Quiet(clock, messages, nights=nights), Beats(), Restless(iter(pauses), clock)
    parts: Any = (core, link, beats)
    link.server = EngineServer(*parts)
    link.server.run()
    assert beats.said.count(False) == nights
    return core, link


def test_a_loop_without_work_sleeps_until_a_message_comes(clock: HandClock) -> None:
    core, link = run(clock, [], [], nights=3)
    assert link.naps == [None] * 3
    assert core.checks == []


def test_it_wakes_as_often_as_the_core_has_something_to_go_on_with(clock: HandClock) -> None:
    core, link = run(clock, [0.25, 0.25, 1.0, None], [], nights=4)
    assert link.naps == [0.25, 0.25, 1.0, None]
    assert core.ticks == 4


@pytest.mark.parametrize("pause", [0.25, 0.3, 5.0, None])
def test_books_are_checked_once_after_a_quiet_second_whatever_goes_on(clock: HandClock, pause: float | None) -> None:
    began = clock.now
    core, link = run(clock, [pause] * 20, [Submit(request("one"))], nights=10)
    assert len(core.checks) == 1
    assert core.checks[0] == pytest.approx(began + 1.0)
    assert link.naps[-1] == pause
