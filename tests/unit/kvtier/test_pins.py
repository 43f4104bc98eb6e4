"""The life of a pin: how long it lives, what brings it back after a restart, and in which order pins are told."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from lamina_kvtier import (
    Denial,
    Floor,
    Granting,
    IdentityChain,
    KvManager,
    Pin,
    PinBook,
    PinTier,
    Quota,
    QuotaBook,
    UnknownPin,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def book(capacity: int = 64, *, clock: Clock | None = None) -> PinBook:
    quotas = QuotaBook(capacity)
    quotas.load({"a": Quota(capacity, capacity, capacity)})
    tier = PinTier(quotas, KvManager(capacity, 1, quotas=quotas))
    return PinBook({Floor.GPU: tier}, clock=Clock() if clock is None else clock)


def chain(*tokens: int) -> list[bytes]:
    identities = IdentityChain(bytes(32), 1)
    identities.extend(tokens)
    return identities.ids


def test_the_listing_is_in_the_order_of_granting() -> None:
    pins = book()
    granted = [pins.pin("a", chain(number), floor=Floor.GPU, ttl_s=9, hard_max_s=9).pin for number in range(20)]
    assert pins.listing() == granted


def test_a_restart_keeps_that_order() -> None:
    pins, later = book(), book()
    granted = [pins.pin("a", chain(number), floor=Floor.GPU, ttl_s=9, hard_max_s=9).pin for number in range(20)]
    assert later.restore(json.loads(json.dumps(pins.to_records()))) == granted
    assert later.listing() == granted


def granted(pins: PinBook, *tokens: int, ttl_s: float = 10.0, hard_max_s: float = 25.0) -> Pin:
    pin = pins.pin("a", chain(*tokens), floor=Floor.GPU, ttl_s=ttl_s, hard_max_s=hard_max_s).pin
    assert pin is not None
    return pin


def test_each_hit_begins_the_time_to_live_anew_up_to_the_hard_maximum() -> None:
    """Beyond that nothing keeps it, and its blocks are ordinary again."""
    clock = Clock()
    pins = book(clock=clock)
    pin = granted(pins, 1, 2)
    expiries = []
    for now in (1004.0, 1012.0, 1019.0, 1024.9):
        clock.now = now
        [used] = pins.hit("a", chain(1, 2, 3))
        expiries.append(used.expires_at)
        assert used.last_hit_at == now
    assert expiries == [1014.0, 1022.0, 1025.0, 1025.0]
    assert pins.get("a", pin.pin_id).hits == 4
    clock.now = 1025.0
    assert pins.hit("a", chain(1, 2)) == []
    with pytest.raises(UnknownPin):
        pins.get("a", pin.pin_id)
    pins.check_integrity()


def test_a_hit_never_shortens_a_pin() -> None:
    """Its owner may have renewed it for longer than its usual time to live."""
    clock = Clock()
    pins = book(clock=clock)
    pin = granted(pins, 1)
    pins.renew("a", pin.pin_id, ttl_s=20.0)
    pins.renew("a", pin.pin_id, ttl_s=5.0)
    assert pins.get("a", pin.pin_id).expires_at == 1005.0
    clock.now = 1001.0
    [used] = pins.hit("a", chain(1))
    assert used.expires_at == 1006.0


def test_a_prefix_that_ends_within_the_pin_is_no_hit() -> None:
    """Nor is another namespace's, nor another prefix of the same length."""
    pins = book()
    granted(pins, 1, 2, 3)
    assert pins.hit("a", chain(1, 2)) == pins.hit("b", chain(1, 2, 3)) == pins.hit("a", chain(1, 2, 4)) == []


def test_denials_say_what_was_missing() -> None:
    """And when to ask again: when the first of the own pins ends."""
    clock = Clock()
    pins = book(4, clock=clock)
    granted(pins, 1, 2, 3)
    clock.now += 4.0
    answer = pins.pin("a", chain(7, 8, 9), floor=Floor.GPU, ttl_s=1, hard_max_s=1)
    assert (answer.granting, answer.reason) == (Granting.CLIPPED, Denial.PIN_LIMIT)
    assert (answer.blocks, answer.limit, answer.need, answer.have, answer.retry_after_s) == (1, 4, 3, 1, 6.0)
    answer = pins.pin("a", chain(10), floor=Floor.GPU, ttl_s=1, hard_max_s=1)
    assert (answer.granting, answer.need, answer.have, answer.retry_after_s) == (Granting.DENIED, 1, 0, 1.0)
    assert pins.pin("a", chain(10), floor=Floor.HOST, ttl_s=1, hard_max_s=1).reason is Denial.NO_SUCH_TIER


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"pin_id": ""},
        {"pin_id": 7},
        {"namespace": None},
        {"floor": "tape"},
        {"ids": []},
        {"ids": ["00"]},
        {"ids": ["zz" * 32]},
        {"ids": ["00" * 32, "00" * 32]},
        {"ids": 5},
        {"hits": 1.5},
        {"clipped_blocks": "2"},
        {"ttl_s": 0.0},
        {"ttl_s": math.nan},
        {"ttl_s": 26.0},
        {"hard_max_s": math.inf},
        {"expires_at": 999.0},
        {"expires_at": 1025.1},
        {"expires_at": "tomorrow"},
        {"owner": "nobody"},
    ],
    ids=str,
)
def test_what_is_no_record_is_refused_before_any_is_taken(change: dict[str, Any]) -> None:
    """A damaged row must not bring half of the pins back."""
    [record] = book_with_one().to_records()
    pins = book()
    with pytest.raises(ValueError, match="not the record of a pin"):
        pins.restore([record, record | {"pin_id": "pin_other"} | change])
    assert pins.listing() == []


@pytest.mark.parametrize("field", ["version", "pin_id", "ids", "expires_at"])
def test_a_record_needs_all_its_fields(field: str) -> None:
    [record] = book_with_one().to_records()
    del record[field]
    with pytest.raises(ValueError, match="not the record of a pin"):
        Pin.from_record(record)


def book_with_one() -> PinBook:
    pins = book()
    granted(pins, 1, 2)
    return pins


def test_a_restart_takes_what_is_alive_and_has_a_place() -> None:
    """Expired ones, ones of a tier that is not there any more, and ones that are here already are left out."""
    clock = Clock()
    [record] = book_with_one().to_records()
    pins = book(clock=clock)
    below = record | {"pin_id": "pin_below", "floor": "host"}
    old = record | {"pin_id": "pin_old", "expires_at": 1000.0}
    assert [pin.pin_id for pin in pins.restore([record, below, old])] == [record["pin_id"]]
    clock.now = 1003.0
    pins.hit("a", chain(1, 2))
    assert [pin.hits for pin in pins.restore([record])] == [1]
    pins.check_integrity()
