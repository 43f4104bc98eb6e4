"""A tenant that left others its share for a while is served at once when it returns: as far as its credit goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lamina.engine.queue import FairQueue

CREDIT, TOKENS = 100.0, 10


def stub(tenant: str, order: int) -> Any:
    return SimpleNamespace(request=SimpleNamespace(tenant=tenant), order=order)


def serve(queue: FairQueue, turns: int) -> list[str]:
    """Serves the least served tenant TOKENS at a time; each has always something more."""
    served = []
    for _ in range(turns):
        head = queue.heads()[0]
        tenant = head.request.tenant
        queue.charge(tenant, TOKENS, 1.0)
        served.append(tenant)
    return served


def leave(queue: FairQueue, tenant: str) -> None:
    head = queue.head(tenant)
    assert head is not None
    queue.remove(head)


def test_who_returns_is_served_at_once_up_to_its_credit():
    """However long it was away; from then on they alternate."""
    queue = FairQueue(CREDIT)
    queue.push(stub("busy", 1))
    serve(queue, 500)
    queue.push(stub("back", 2))
    served = serve(queue, 40)
    ahead = served.index("busy")
    assert 9 <= ahead <= 11
    assert abs(served[ahead:].count("busy") - served[ahead:].count("back")) <= 1


def test_who_never_leaves_the_others_anything_gets_no_more_than_its_share():
    """Coming and going without a pause between is no trick."""
    queue = FairQueue(CREDIT)
    queue.push(stub("busy", 1))
    served: list[str] = []
    for turn in range(200):
        queue.push(stub("trick", 2 + turn))
        served += serve(queue, 4)
        leave(queue, "trick")
    assert abs(served.count("trick") - served.count("busy")) <= 1 + CREDIT / TOKENS


def test_who_asks_for_less_than_its_share_does_not_wait():
    """Three turns of every eight: each time it gets them first."""
    queue = FairQueue(CREDIT)
    queue.push(stub("busy", 1))
    serve(queue, 20)
    for turn in range(50):
        queue.push(stub("calm", 2 + turn))
        assert serve(queue, 3) == ["calm"] * 3
        leave(queue, "calm")
        serve(queue, 5)


def test_to_be_forgotten_earns_nothing():
    """Books are closed only when opening them again comes to the same."""
    queue = FairQueue(CREDIT)
    queue.push(stub("busy", 1))
    queue.push(stub("calm", 2))
    serve(queue, 20)
    leave(queue, "calm")
    before = queue.served("calm")
    queue.forget_idle({"busy"})
    assert queue.served("calm") == before
    serve(queue, 12)
    queue.forget_idle({"busy"})
    assert "calm" not in queue._served
