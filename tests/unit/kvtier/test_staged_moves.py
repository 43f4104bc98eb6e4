"""Moves through somebody else's memory: each ends once, in time, and its memory is never touched afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from lamina_kvtier.staged_moves import Move, Mover
from lamina_kvtier.tier import Outcome

PATIENCE_S = 30.0
SOON_S, LATE_S = 0.05, 60.0


def a_move(blocks: int = 3, limit_s: float = LATE_S, told: list[Sequence[Outcome]] | None = None) -> Move:
    views = [memoryview(bytearray(4)) for _ in range(blocks)]
    conclude: Callable[[Sequence[Outcome]], None] = (lambda outcomes: None) if told is None else told.append
    return Move([bytes([at]) * 32 for at in range(blocks)], views, time.monotonic() + limit_s, conclude)


def test_it_ends_when_each_block_has_its_outcome() -> None:
    """The first answer counts, and the end is told once."""
    told: list[Sequence[Outcome]] = []
    move = a_move(2, told=told)
    move.settle(1, Outcome.MISSING)
    move.settle(1, Outcome.OK)
    assert not move.done()
    move.settle(0, Outcome.OK)
    move.cancel()
    assert move.result(0) == (Outcome.OK, Outcome.MISSING)
    assert told == [[Outcome.OK, Outcome.MISSING]]


def test_nothing_has_ended_already() -> None:
    assert a_move(0).result(0) == ()


def test_a_deadline_ends_it_and_takes_its_memory() -> None:
    """Nobody has to be waiting for that: whoever wants to hold it finds it over."""
    move = a_move(limit_s=SOON_S)
    move.settle(0, Outcome.OK)
    time.sleep(2 * SOON_S)
    with move.hold() as views:
        assert views is None
    assert move.result() == (Outcome.OK, Outcome.TIMEOUT, Outcome.TIMEOUT)


def test_waiting_shorter_than_it_takes() -> None:
    move = a_move()
    with pytest.raises(TimeoutError, match="under way"):
        move.result(0.01)
    assert not move.done()


def test_it_does_not_end_while_its_memory_is_held() -> None:
    """Whoever cancels waits for the copy, which takes moments."""
    move, ended = a_move(), threading.Event()

    def cancel() -> None:
        move.cancel()
        ended.set()

    with move.hold() as views:
        assert views is not None
        thread = threading.Thread(target=cancel)
        thread.start()
        assert not ended.wait(SOON_S)
        views[0][:] = b"done"
    thread.join(PATIENCE_S)
    assert move.result(0) == (Outcome.CANCELLED,) * 3


def test_windows_in_order() -> None:
    seen: list[range] = []

    def carry(move: Move, blocks: range) -> None:
        seen.append(blocks)
        for at in blocks:
            move.settle(at, Outcome.OK)

    mover = Mover("mover", 2, carry)
    moves = [a_move(5), a_move(1)]
    for move in moves:
        mover.submit(move)
    assert [move.result(PATIENCE_S) for move in moves] == [(Outcome.OK,) * 5, (Outcome.OK,)]
    assert seen == [range(2), range(2, 4), range(4, 5), range(1)]
    mover.close()
    assert mover.join(PATIENCE_S)


def test_a_failing_carrier_costs_one_move() -> None:
    """What it had settled stays; the next one is carried."""

    def carry(move: Move, blocks: range) -> None:
        move.settle(0, Outcome.OK)
        if len(blocks) > 1:
            raise RuntimeError("a surprise")

    mover = Mover("mover", 8, carry)
    broken, next_one = a_move(2), a_move(1)
    mover.submit(broken)
    mover.submit(next_one)
    assert broken.result(PATIENCE_S) == (Outcome.OK, Outcome.UNAVAILABLE)
    assert next_one.result(PATIENCE_S) == (Outcome.OK,)
    mover.close()


def test_a_carrier_that_hangs_costs_no_deadline() -> None:
    """Neither its own move's nor those of the moves behind it; and closing ends all that are left."""
    released = threading.Event()
    mover = Mover("mover", 8, lambda move, blocks: released.wait(PATIENCE_S) and None)
    moves = [a_move(limit_s=SOON_S), a_move(limit_s=SOON_S), a_move()]
    for move in moves:
        mover.submit(move)
    assert [move.result(PATIENCE_S) for move in moves[:2]] == [(Outcome.TIMEOUT,) * 3] * 2
    mover.close()
    assert moves[2].result(0) == (Outcome.CANCELLED,) * 3
    assert not mover.join(SOON_S)
    released.set()
    assert mover.join(PATIENCE_S)


def test_after_closing_moves_are_cancelled() -> None:
    mover = Mover("mover", 8, lambda move, blocks: None)
    mover.close()
    move = a_move()
    mover.submit(move)
    assert move.result(0) == (Outcome.CANCELLED,) * 3
