"""The fair queue: shares by weight, order by age, no credit for idleness."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from lamina.engine.queue import FairQueue
from lamina.engine.request import Choice


@dataclass(eq=False)
class Stub:
    """As much of a Choice as the queue looks at."""

    tenant: str
    age: int
    request: Any = field(init=False)

    def __post_init__(self) -> None:
        self.request = self

    @property
    def order(self) -> tuple[int, int]:
        return (self.age, 0)


def stub(tenant: str, age: int) -> Choice:
    return cast(Choice, Stub(tenant, age))


def serve(queue: FairQueue, weights: dict[str, float], rounds: int, tokens: int = 10) -> Counter[str]:
    """Serves the head `rounds` times, each worth `tokens`; the served one queues again."""
    served: Counter[str] = Counter()
    for age in range(1000, 1000 + rounds):
        head = queue.heads()[0]
        tenant = head.request.tenant
        queue.remove(head)
        queue.push(stub(tenant, age))
        queue.charge(tenant, tokens, weights[tenant])
        served[tenant] += 1
    return served


def test_equal_tenants_alternate() -> None:
    """A tenant with many requests gets no more than one with few."""
    queue = FairQueue()
    for age in range(50):
        queue.push(stub("flood", age))
    queue.push(stub("calm", 60))
    served = serve(queue, {"flood": 1.0, "calm": 1.0}, 40)
    assert abs(served["flood"] - served["calm"]) <= 1


def test_weights_are_shares() -> None:
    queue = FairQueue()
    for tenant in "abc":
        queue.push(stub(tenant, 1))
    served = serve(queue, {"a": 1.0, "b": 2.0, "c": 5.0}, 800)
    assert served["a"] == pytest.approx(100, abs=3)
    assert served["b"] == pytest.approx(200, abs=3)
    assert served["c"] == pytest.approx(500, abs=3)


def test_idleness_earns_no_credit() -> None:
    """A tenant that comes back after the others were served a lot shares from now on, instead of taking over."""
    queue = FairQueue()
    queue.push(stub("busy", 1))
    serve(queue, {"busy": 1.0}, 500)
    queue.push(stub("back", 2))
    served = serve(queue, {"busy": 1.0, "back": 1.0}, 40)
    assert served["busy"] >= 19


def test_a_preempted_choice_returns_to_its_place() -> None:
    """Within a tenant the order is age, whenever a choice was pushed."""
    queue = FairQueue()
    young, old, middle = stub("t", 30), stub("t", 10), stub("t", 20)
    for choice in (young, old, middle):
        queue.push(choice)
    assert list(queue) == [old, middle, young]
    queue.remove(old)
    queue.push(old)
    assert queue.heads() == [old]


def test_removing_what_does_not_wait_is_an_error() -> None:
    queue = FairQueue()
    with pytest.raises(ValueError, match="not in"):
        queue.remove(stub("t", 1))
    assert len(queue) == 0


def test_books_of_idle_tenants_are_closed() -> None:
    """Ten thousand tenants that came once leave no trace, except debts that are not worked off yet."""
    queue = FairQueue()
    for number in range(10_000):
        choice = stub(f"tenant{number}", number)
        queue.push(choice)
        queue.remove(choice)
        queue.charge(f"tenant{number}", 5, 1.0)
    queue.push(stub("last", 1))
    for _ in range(3):
        queue.charge("last", 10, 1.0)
    queue.forget_idle(active=set())
    assert len(queue._served) < 10
