"""The machine over everything finds mistakes: each of these, made on purpose, breaks a rule within some examples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from lamina.engine.core import EngineCore
from lamina.engine.erasure import Erasure
from lamina.engine.explain import Explainer
from lamina.engine.request import Choice
from lamina.engine.tier_fetch import Fetch
from lamina.engine.tier_lift import Lift
from lamina.engine.tier_spill import Spills, _Spill
from lamina_kvtier.block_codec import BlockCodec, Header
from lamina_kvtier.errors import KvError
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_kvtier.pin_types import Floor
from lamina_kvtier.pins import PinBook
from lamina_kvtier.quota import Quota, QuotaBook
from lamina_kvtier.reclaim import ReclaimOrder
from lamina_kvtier.tier import Outcome
from support.whole_machine import WholeMachine

Mutate = Callable[[pytest.MonkeyPatch], None]


# --- transfers ------------------------------------------------------------------------------------------------


def spills_are_taken_for_done(patch: pytest.MonkeyPatch) -> None:
    """The slot is found before the block has come."""

    def end(self: Spills, spill: _Spill) -> bool:
        self._host.commit(spill.reservations)
        self._puts.want([reservation.key for reservation in spill.reservations])
        return True

    patch.setattr(Spills, "_end", end)


def blocks_are_published_before_they_have_come(patch: pytest.MonkeyPatch) -> None:
    copy = Lift.copy

    def hasty(self: Lift, spilling: frozenset[int]) -> bool:
        started = copy(self, spilling)
        for block, key in zip(self.targets if self.transfer else [], self.keys, strict=False):
            self.paths.kv.publish(block, key.id, adapter=key.adapter)
        return started

    patch.setattr(Lift, "copy", hasty)


def slots_are_not_held(patch: pytest.MonkeyPatch) -> None:
    """A slot is reused while it is promoted, or written to the store."""
    for name in ("hold", "release", "put_back"):
        patch.setattr(HostTier, name, lambda self, slots: None)


def copies_before_a_write_are_not_made(patch: pytest.MonkeyPatch) -> None:
    """Choices of one request write into each other's blocks."""
    patch.setattr(KvManager, "make_writable", lambda self, block, *, owner=None: None)
    patch.setattr(KvManager, "is_shared", lambda self, block: False)


# --- whose and what -------------------------------------------------------------------------------------------


def somebody_else_pays_for_what_is_fetched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fetch, "_device_blocks", lambda self, count: self.paths.kv.allocate(count, owner="c0"))


def checksums_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    def believe(self: BlockCodec, header: Header, payload: memoryview, into: memoryview) -> Outcome:
        into[:] = bytes(payload).ljust(len(into), b"\0")
        return Outcome.OK

    patch.setattr(BlockCodec, "finish", believe)


def namespaces_are_no_part_of_identities(patch: pytest.MonkeyPatch) -> None:
    root = EngineCore._root
    patch.setattr(EngineCore, "_root", lambda self, adapter, namespace: root(self, adapter, "everybody"))


def what_comes_after_an_erasure_stays(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Erasure, namespaces: Collection[str], adapters: Collection[bytes]) -> None:
        self._pending.clear()

    patch.setattr(Erasure, "go_on", forget)


# --- promises -------------------------------------------------------------------------------------------------


def whoever_is_oldest_goes(patch: pytest.MonkeyPatch) -> None:
    """Whatever was reserved."""

    def victim(self: ReclaimOrder, requester: str) -> tuple[int, str] | None:
        name = min(self._queues, default=None)
        return None if name is None else (self._queues[name].oldest, "over_share")

    patch.setattr(ReclaimOrder, "victim", victim)


def more_is_promised_than_there_is(patch: pytest.MonkeyPatch) -> None:
    def allow(self: QuotaBook, policies: Mapping[str, Quota]) -> None:
        """Anything."""

    patch.setattr(QuotaBook, "require_coverable", allow)


def pins_outlive_their_limits(patch: pytest.MonkeyPatch) -> None:
    def keep(self: PinBook, floor: Floor, namespace: str) -> None:
        """All of them."""

    patch.setattr(PinBook, "_clip_to_limit", keep)


def what_others_computed_is_not_told(patch: pytest.MonkeyPatch) -> None:
    def taken(self: Explainer, choice: Choice, ids: Sequence[BlockId]) -> None:
        for identity in ids:
            if choice.request.lookup is not None:
                choice.request.lookup.missing.pop(identity, None)

    patch.setattr(Explainer, "taken", taken)


MUTANTS: list[Mutate] = [
    spills_are_taken_for_done,
    blocks_are_published_before_they_have_come,
    slots_are_not_held,
    copies_before_a_write_are_not_made,
    somebody_else_pays_for_what_is_fetched,
    checksums_are_not_compared,
    namespaces_are_no_part_of_identities,
    what_comes_after_an_erasure_stays,
    whoever_is_oldest_goes,
    more_is_promised_than_there_is,
    pins_outlive_their_limits,
    what_others_computed_is_not_told,
]


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_mistake_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KvError, KeyError)):
        run_state_machine_as_test(
            WholeMachine,
            settings=settings(
                max_examples=300,
                stateful_step_count=40,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
