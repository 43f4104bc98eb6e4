"""Pins of one moment keep the order in which they were granted, whatever their random names are."""

from __future__ import annotations

import json

from lamina_kvtier import Floor, IdentityChain, KvManager, PinBook, PinTier, Quota, QuotaBook


def book(capacity: int = 64) -> PinBook:
    quotas = QuotaBook(capacity)
    quotas.load({"a": Quota(capacity, capacity, capacity)})
    return PinBook({Floor.GPU: PinTier(quotas, KvManager(capacity, 1, quotas=quotas))}, clock=lambda: 1000.0)


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
