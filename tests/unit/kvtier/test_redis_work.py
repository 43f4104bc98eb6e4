"""Requests between their owner and the lanes: who may end them when, and that each batch ends exactly once."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from lamina_kvtier.redis_plane.resp import ReplyReader
from lamina_kvtier.redis_plane.work import Batch, Failure, Request, Step, WorkQueue


class _Job(Request):
    def __init__(self, cost: int = 1) -> None:
        super().__init__()
        self.cost = cost  # type: ignore[misc]
        self.failures: list[Failure] = []

    def frames(self) -> Sequence[bytes]:
        return []

    def receive(self, reader: ReplyReader) -> Step:
        return Step.DONE

    def fail(self, failure: Failure) -> None:
        self.failures.append(failure)


def _batch(jobs: Sequence[_Job], limit_s: float = 60.0) -> Batch[list[list[Failure]]]:
    return Batch(jobs, time.monotonic() + limit_s, lambda: [job.failures for job in jobs])


def test_each_lane_takes_its_share_within_its_window() -> None:
    queue = WorkQueue(lanes=3)
    _batch([_Job(cost=10) for _ in range(9)]).enter(queue)
    assert len(queue.take(1000, 128, at_least_one=True)) == 3
    assert len(queue.take(15, 128, at_least_one=True)) == 1
    assert len(queue.take(5, 128, at_least_one=False)) == 0
    assert len(queue.take(5, 128, at_least_one=True)) == 1  # larger than the window, but alone
    assert len(queue.take(1000, 1, at_least_one=True)) == 1


def test_an_empty_batch_is_done() -> None:
    assert _batch([]).result(0) == []


def test_at_its_deadline_what_is_queued_ends_and_what_a_lane_has_does_not() -> None:
    """The lane's request may still be writing into memory."""
    queue = WorkQueue(lanes=1)
    jobs = [_Job(), _Job()]
    batch = _batch(jobs, limit_s=0.02)
    batch.enter(queue)
    (taken,) = queue.take(1, 1, at_least_one=True)
    with pytest.raises(TimeoutError):
        batch.result(0.1)
    assert not batch.done()
    assert jobs[1].failures == [Failure.TIMEOUT]
    queue.end(taken, Failure.TIMEOUT)
    assert batch.result(0) == [[Failure.TIMEOUT], [Failure.TIMEOUT]]
    assert queue.take(10, 10, at_least_one=True) == []


def test_what_is_late_ends_without_a_lane() -> None:
    """Nobody asked in time whether it is done; behind it others still have time."""
    queue = WorkQueue(lanes=1)
    late, job = _Job(), _Job()
    batch = _batch([late], limit_s=0.0)
    batch.enter(queue)
    _batch([job]).enter(queue)
    assert queue.take(10, 10, at_least_one=True) == [job]
    assert batch.result(0) == [[Failure.TIMEOUT]]


def test_a_cancelled_request_is_not_tried_again() -> None:
    queue = WorkQueue(lanes=1)
    jobs = [_Job()]
    batch = _batch(jobs)
    batch.enter(queue)
    taken = queue.take(10, 10, at_least_one=True)
    batch.cancel()
    assert not batch.done()
    queue.give_back(taken)
    assert batch.result(0) == [[Failure.CANCELLED]]


def test_what_is_given_back_comes_first_and_in_order() -> None:
    queue = WorkQueue(lanes=1)
    jobs = [_Job() for _ in range(4)]
    _batch(jobs).enter(queue)
    taken = queue.take(10, 2, at_least_one=True)
    queue.give_back(taken)
    assert queue.take(10, 10, at_least_one=True) == jobs


def test_flushing_ends_what_is_queued() -> None:
    queue = WorkQueue(lanes=1)
    batch = _batch([_Job(), _Job()])
    batch.enter(queue)
    queue.flush(Failure.UNAVAILABLE)
    assert batch.result(0) == [[Failure.UNAVAILABLE]] * 2


def test_a_closed_queue_cancels_and_wakes() -> None:
    queue = WorkQueue(lanes=1)
    woken: list[bool] = []
    waiter = threading.Thread(target=lambda: woken.append(queue.wait()))
    waiter.start()
    queue.close()
    waiter.join(10)
    assert woken == [False]
    late = _batch([_Job()])
    late.enter(queue)
    assert late.result(0) == [[Failure.CANCELLED]]


def test_a_request_ends_once_whoever_is_first() -> None:
    """Owners that cancel, lanes that answer, fail and give back, and a breaker that flushes, all at once."""
    queue = WorkQueue(lanes=3)
    stop = threading.Event()

    def lane(seed: int) -> None:
        while not stop.is_set():
            for number, request in enumerate(queue.take(5, 5, at_least_one=True)):
                if (number + seed) % 3 == 0 and request.attempts < 3:
                    request.attempts += 1
                    queue.give_back([request])
                else:
                    queue.end(request, Failure.UNAVAILABLE)

    lanes = [threading.Thread(target=lane, args=(seed,)) for seed in range(3)]
    for thread in lanes:
        thread.start()
    for number in range(300):
        batch = _batch([_Job() for _ in range(7)], limit_s=0.0 if number % 5 == 0 else 60.0)
        batch.enter(queue)
        if number % 2:
            batch.cancel()
        if number % 7 == 0:
            queue.flush(Failure.UNAVAILABLE)
        assert [len(failures) for failures in batch.result(20)] == [1] * 7
    stop.set()
    for thread in lanes:
        thread.join(10)
