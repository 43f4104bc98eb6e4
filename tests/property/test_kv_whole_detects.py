"""The machine over everything finds mistakes: each of these, made on purpose, breaks a rule within some examples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
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
from support.poison import LateTransfer
from support.whole_machine import MovingMachine, WholeMachine

Mutate = Callable[[pytest.MonkeyPatch], None]


# --- transfers ------------------------------------------------------------------------------------------------


def spills_are_taken_for_done(patch: pytest.MonkeyPatch) -> None:
    """The slot is found before the block has come."""

    def end(self: Spills, spill: _Spill) -> bool:
        self._host.commit(spill.reservations)
        self._puts.want([reservation.key for reservation in spill.reservations])
        return True

    patch.setattr(Spills, "_end", end)


def steps_overwrite_what_is_being_spilled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Spills, "before_step", lambda self, written: None)


def blocks_are_published_before_they_have_come(patch: pytest.MonkeyPatch) -> None:
    copy = Lift.copy

    def hasty(self: Lift, spilling: frozenset[int]) -> bool:
        started = copy(self, spilling)
        for block, key in zip(self.targets if self.transfer else [], self.keys, strict=False):
            self.paths.kv.publish(block, key.id, adapter=key.adapter)
        return started

    patch.setattr(Lift, "copy", hasty)


def blocks_are_let_go_before_they_have_come(patch: pytest.MonkeyPatch) -> None:
    """Whoever wanted them does not any more; the copy is still to write them."""
    cancel = Lift.cancel

    def hasty(self: Lift) -> None:
        cancel(self)
        self._drop_targets()

    patch.setattr(Lift, "cancel", hasty)


def slots_are_not_held(patch: pytest.MonkeyPatch) -> None:
    """A slot is reused while it is promoted, or written to the store."""
    for name in ("hold", "release", "put_back"):
        patch.setattr(HostTier, name, lambda self, slots: None)


def failed_copies_are_taken_for_good_ones(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LateTransfer, "wait", lambda self: self._lane.run_until(self))


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


_SEEDS = (2, 5, 3, 4, 1, 6, 7, 8)  # until one notices; in the order in which they do
_SETTINGS = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
MUTANTS: list[tuple[Mutate, type[WholeMachine]]] = [
    (spills_are_taken_for_done, MovingMachine),
    (steps_overwrite_what_is_being_spilled, MovingMachine),
    (blocks_are_published_before_they_have_come, MovingMachine),
    (blocks_are_let_go_before_they_have_come, MovingMachine),
    (slots_are_not_held, MovingMachine),
    (failed_copies_are_taken_for_good_ones, MovingMachine),
    (copies_before_a_write_are_not_made, MovingMachine),
    (somebody_else_pays_for_what_is_fetched, MovingMachine),
    (checksums_are_not_compared, MovingMachine),
    (namespaces_are_no_part_of_identities, MovingMachine),
    (what_comes_after_an_erasure_stays, MovingMachine),
    (what_others_computed_is_not_told, MovingMachine),
    (whoever_is_oldest_goes, WholeMachine),
    (more_is_promised_than_there_is, WholeMachine),
    (pins_outlive_their_limits, WholeMachine),
]


@pytest.mark.parametrize(("mutate", "machine"), MUTANTS, ids=[mutate.__name__ for mutate, _ in MUTANTS])
def test_a_mistake_is_found(mutate: Mutate, machine: type[WholeMachine], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KvError, KeyError)):
        _run(machine)


def _run(machine: type[WholeMachine]) -> None:
    for number in _SEEDS:
        run_state_machine_as_test(seed(number)(type("Seeded", (machine,), {})), settings=_SETTINGS)
