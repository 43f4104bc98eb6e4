"""The clairvoyant pool: by hand in small cases, and never worse than anybody who does not know the future."""

from __future__ import annotations

import random

import pytest

from kv_optimal import Found, Gives, Knows, simulate
from kv_replay import quotas_for, replay
from kv_trace import Request, Trace, make_trace, shape_of
from lamina_kvtier import Quota

FAR, WAY = Gives.ANYBODY_OVER, Gives.FURTHEST_OVER


def trace(*calls: tuple[str, list[int]]) -> Trace:
    """One after the other, all of them prompt."""
    requests = tuple(Request(at, at + 0.5, name, tuple(blocks), len(blocks)) for at, (name, blocks) in enumerate(calls))
    distinct = len({block for request in requests for block in request.blocks})
    return Trace(requests, distinct, tuple(dict.fromkeys(name for name, _ in calls)))


def found(calls: Trace, capacity: int, knows: Knows, quotas: dict[str, Quota] | None = None, gives: Gives = FAR) -> int:
    return sum(simulate(calls, capacity, quotas or {}, knows=knows, gives=gives).found.values())


def test_furthest_next_use_keeps_what_comes_back():
    calls = trace(("a", [1]), ("a", [2]), ("a", [3]), ("a", [1]), ("a", [2]))
    assert found(calls, 2, Knows.NOTHING) == 0  # 3 evicts 1, 1 evicts 2
    assert found(calls, 2, Knows.FUTURE) == 1  # 3 evicts 2, whose next use is later; then 2 must be brought in
    assert found(calls, 3, Knows.NOTHING) == found(calls, 3, Knows.FUTURE) == 2


def test_only_a_prefix_is_found():
    calls = trace(("a", [1, 2, 3]), ("a", [1, 9, 3]))
    assert found(calls, 6, Knows.NOTHING) == 1


def test_a_prefix_shrinks_from_its_end():
    calls = trace(("a", [1, 2, 3]), ("a", [7]), ("a", [1, 2, 3]))
    for knows in Knows:
        assert found(calls, 3, knows) == 2


def test_who_is_told_of_endings_drops_what_is_over():
    calls = trace(("a", [1]), ("a", [5]), ("a", [6]), ("a", [1]))
    assert found(calls, 2, Knows.NOTHING) == 0
    assert found(calls, 2, Knows.ENDINGS) == found(calls, 2, Knows.FUTURE) == 1


def test_what_was_used_twice_is_kept_twice_as_long():
    calls = trace(("a", [1]), ("a", [1]), *(("a", [block]) for block in range(10, 13)), ("a", [1]))
    assert found(calls, 3, Knows.NOTHING) == 1
    assert found(calls, 3, Knows.USES) == 2


def test_nobody_is_asked_for_blocks_within_a_reservation():
    calls = trace(("b", [1, 2]), ("a", [11, 12]), ("a", [13, 14]), ("b", [1, 2]))
    quotas = {"a": Quota(0, 4), "b": Quota(2, 4)}
    for knows in Knows:
        for gives in Gives:
            assert simulate(calls, 4, quotas, knows=knows, gives=gives).found["b"] == 2


def test_a_limit_binds_even_who_knows_the_future():
    calls = trace(("a", [1, 2]), ("a", [3]), ("a", [1, 2]))
    assert found(calls, 10, Knows.FUTURE, {"a": Quota(0, 2)}, WAY) == 1
    assert found(calls, 10, Knows.FUTURE, {"a": Quota(0, 3)}, WAY) == 2


def test_what_there_is_no_room_for_is_refused():
    requests = (Request(0, 9, "a", (1, 2), 2), Request(1, 2, "a", (3, 4), 2), Request(10, 11, "a", (3,), 1))
    outcome = simulate(Trace(requests, 4, ("a",)), 3, {}, knows=Knows.FUTURE, gives=FAR)
    assert (outcome.refused, outcome.rate()) == (1, 0.0)


@pytest.mark.parametrize("seed", range(4))
def test_who_knows_nothing_finds_what_the_manager_finds(seed: int):
    """Hit for hit and tenant by tenant, with quotas, overlapping requests, scans and loops."""
    calls = make_trace(seed, requests=60, tenants=4, hours=0.05, scans=0.1, loops=0.1)
    for share in (0.3, 0.5):
        capacity = int(share * calls.distinct)
        quotas = quotas_for(calls, capacity)
        ours, either = replay(calls, capacity, quotas, host_blocks=capacity)
        check = simulate(calls, capacity, quotas, knows=Knows.NOTHING, gives=WAY)
        assert (ours.found, ours.asked, ours.refused) == (check.found, check.asked, check.refused)
        assert sum(either.found.values()) >= sum(ours.found.values())


@pytest.mark.parametrize("seed", range(8))
def test_nobody_finds_more_than_the_bound(seed: int):
    calls = chatter(seed)
    for capacity in (14, 20, 35):
        bound = found(calls, capacity, Knows.FUTURE)
        quotas = {"a": Quota(capacity // 3, capacity), "b": Quota(capacity // 3, capacity // 2)}
        for knows in Knows:
            assert found(calls, capacity, knows) <= bound
            assert all(found(calls, capacity, knows, quotas, gives) <= bound for gives in Gives)


@pytest.mark.parametrize("seed", range(6))
def test_without_quotas_it_is_the_best_of_all_ways_to_evict(seed: int):
    """Against every sequence of evictions there is."""
    chance = random.Random(seed)
    paths = [[1], [1, 2], [1, 3], [4], [4, 5]]
    calls = trace(*(("a", chance.choice(paths)) for _ in range(7)))
    assert found(calls, 3, Knows.FUTURE) == _best(calls.requests, 3, frozenset())


def _best(requests: tuple[Request, ...], capacity: int, resident: frozenset[int]) -> int:
    if not requests:
        return 0
    blocks, rest = requests[0].blocks, requests[1:]
    hits = next((at for at, block in enumerate(blocks) if block not in resident), len(blocks))
    return hits + max(_best(rest, capacity, kept) for kept in _kept(resident | set(blocks), set(blocks), capacity))


def _kept(wanted: frozenset[int], must: set[int], capacity: int) -> list[frozenset[int]]:
    """All ways to bring these down to the capacity without what is in use."""
    if len(wanted) <= capacity:
        return [wanted]
    return [kept for block in wanted - must for kept in _kept(wanted - {block}, must, capacity)]


def chatter(seed: int) -> Trace:
    """Two tenants with conversations that grow, one at a time."""
    chance = random.Random(seed)
    fresh = iter(range(1, 10_000))
    talks: dict[str, list[list[int]]] = {"a": [], "b": []}
    calls = []
    for _ in range(80):
        name = chance.choice("aab")
        talk = chance.choice(talks[name]) if talks[name] and chance.random() < 0.6 else []
        talk = (talk + [next(fresh) for _ in range(chance.randint(1, 3))])[:7]
        talks[name] = [*talks[name], talk][-8:]
        calls.append((name, talk))
    return trace(*calls)


def test_the_workload_is_shaped_like_the_published_ones():
    """What the docstring cites, within a few points; and the same seed is the same workload."""
    calls = make_trace(1, requests=1500)
    shape = shape_of(calls)
    assert 0.5 < shape.found_with_endless_room < 0.65
    assert 0.65 < shape.reuses_of_top_tenth < 0.9
    assert 0.75 < shape.reuses_within_10_min < 0.95
    assert 3000 < shape.mean_prompt_tokens < 8000
    assert 100 < shape.mean_output_tokens < 300
    assert calls == make_trace(1, requests=1500)
    assert all(a.start <= b.start for a, b in zip(calls.requests, calls.requests[1:], strict=False))


def test_an_empty_result_has_a_rate():
    assert Found().rate() == Found().rate("nobody") == 0.0
