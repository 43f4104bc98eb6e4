"""What must hold of a whole engine between any two rules of the machine, told naively: by looking at everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from lamina.engine.core import EngineCore
from lamina.engine.prefix_lookup import NOWHERE
from lamina_kvtier.identity import BlockId
from lamina_kvtier.pin_types import Floor
from lamina_kvtier.reasons import Reason
from lamina_kvtier.tier import BlockKey
from support.simulated import BLOCK, Content, SimulatedModel
from support.whole import WatchedStore, WholeBelow

__all__ = ["WholeRules"]

_REASONS = {reason.value for reason in Reason}
Kept = set[tuple[Floor, str, BlockId]]


class WholeRules:
    """Of one engine. Each method raises AssertionError, or IntegrityError."""

    def __init__(
        self,
        core: EngineCore,
        model: SimulatedModel,
        below: WholeBelow,
        store: WatchedStore,
        written: Mapping[BlockId, Content],
    ) -> None:
        self.core, self.model, self.below, self.store, self.written = core, model, below, store, written
        self.looked: Counter[str] = Counter()  # blocks that prompts looked for, by namespace

    # --- contents -----------------------------------------------------------------------------------------

    def on_device(self) -> dict[BlockId, int]:
        kv = self.below.kv
        return {identity: block for identity in kv.known() if (block := kv.find(identity)) is not None}

    def in_host(self) -> dict[BlockKey, int]:
        found = ((self.below.slots.key_of(slot), slot) for slot in self.below.slots.stored())
        return {key: slot for key, slot in found if key is not None}

    def contents(self) -> None:
        """Whatever can be found was computed once, is whole, and is charged to whom it belongs."""
        kv, arena = self.below.kv, self.below.tiers.below
        assert arena is not None
        for identity, block in self.on_device().items():
            content = self.written[identity]
            assert self.model.memory[block].tobytes() == content.data, f"block {block} is known, and holds other bytes"
            assert (kv.owner_of(block), kv.adapter_of(block)) == (content.key.namespace, content.key.adapter)
        for key, slot in self.in_host().items():
            assert key == self.written[key.id].key, (
                f"slot {slot} is said to be {key}, but is {self.written[key.id].key}"
            )
            assert bytes(arena.arena.bytes_of(slot)) == self.written[key.id].data, f"slot {slot} holds other bytes"
        assert self.below.slots.broken(self.below.slots.stored()) == []
        for identity, (namespace, value) in self.store.contents().items():
            content = self.written[identity]
            assert namespace == content.key.namespace
            assert self.store.is_damaged(identity) or value.endswith(content.data), "the store keeps other bytes"

    def nothing_of(self, erased: Callable[[BlockKey], bool]) -> None:
        """What was erased is known nowhere in the engine."""
        assert not [key for key in map(self._key, self.on_device()) if erased(key)], "the pool has what was erased"
        assert not [key for key in self.in_host() if erased(key)], "host memory has what was erased"

    def _key(self, identity: BlockId) -> BlockKey:
        return self.written[identity].key

    # --- tables and charges -------------------------------------------------------------------------------

    def charges(self) -> None:
        """Blocks, slots and bytes, one by one."""
        kv, slots = self.below.kv, self.below.slots
        owners = Counter(owner for block in range(kv.num_blocks) if (owner := kv.owner_of(block)) is not None)
        usage, ledger = kv.usage(), kv.ledger
        assert ledger is not None
        assert usage.free + usage.active + usage.cached == usage.total == kv.num_blocks
        assert {name: account.committed for name, account in ledger.accounts.items() if account.committed} == owners
        assert owners.total() == usage.total - usage.free
        for choice in self.core.scheduler.running:
            assert {kv.owner_of(block) for block in choice.table} <= {choice.request.request.namespace}
        below, in_use = slots.usage(), slots.slots_in_use()
        assert below.free + below.writing + below.held + below.cached + below.pinned == below.total
        assert {name: slots.slots_of(name) for name in in_use} == in_use
        assert in_use.total() == below.total - below.free
        bytes_ = Counter[str]()
        for namespace, value in self.store.contents().values():
            bytes_[namespace] += len(value)
        assert self.store.bytes == bytes_.total() <= (self.store.limit or 0)
        self._bounded(owners, in_use)

    def _bounded(self, blocks: Counter[str], slots: Counter[str]) -> None:
        """All promises can be kept."""
        commons = self.below.tiers.commons_of_host
        assert commons is not None
        for book in (self.core.scheduler.admission._ledger.book, commons.book):
            assert not book.loaded or book.reserved <= book.coverable
        assert blocks.total() <= self.below.kv.num_blocks
        assert slots.total() <= self.below.slots.num_slots

    # --- transfers ----------------------------------------------------------------------------------------

    def transfers(self) -> None:
        """What is under way belongs to nobody else. (A block that is only read may be anybody's: who writes waits.)"""
        kv, slots, mover = self.below.kv, self.below.slots, self.below.late_mover
        held = {block for table in self.below.tiers.held_tables() for block in table}
        for block in mover.targets():
            assert kv.identity_of(block) is None, f"block {block} can be found before it has come"
            assert block in held, f"block {block} is let go before it has come"
            assert kv.owner_of(block) is not None
        assert all(map(slots.is_held, mover.sources())), "a slot is let go before it was read"
        assert all(map(slots.is_written, mover.destinations())), "a slot is given away before it was written"
        assert not mover.targets() & mover.still_reads()

    # --- pins ---------------------------------------------------------------------------------------------

    def pins(self, kept: Kept) -> Kept:
        """No more than the limits allow; and what a floor kept at the last look, `kept`, it keeps. Returns what now."""
        commons, kv, slots = self.core.commons, self.below.kv, self.below.slots
        pinned = {(pin.floor, pin.namespace, identity) for pin in commons._pins.listing() for identity in pin.ids}
        count = Counter((floor, name) for floor, name, _ in pinned)
        host = self.below.tiers.commons_of_host
        assert host is not None
        for (floor, name), blocks in count.items():
            book = commons._ledger.book if floor is Floor.GPU else host.book
            assert not book.loaded or blocks <= book.of(name).pin_limit <= book.of(name).reserved
        there = set()
        for floor, name, identity in pinned:
            block = kv.find(identity)
            on_device = block is not None and kv.owner_of(block) == name
            if on_device or (floor is Floor.HOST and slots.knows(identity)):
                there.add((floor, name, identity))
        assert kept & pinned <= there, "a pinned block is gone"
        return there

    # --- look-ups -----------------------------------------------------------------------------------------

    def lookups(self) -> None:
        """Each block that a prompt looked for is found, missed for a reason, or not told yet."""
        told: Counter[str] = Counter()
        for tenant in self.core.explainer.report().tenants:
            assert {tier for tier, _ in tenant.hits} <= {"gpu", "host", "store"}
            for tier, reason, _ in tenant.misses:
                assert tier in ("gpu", "host", "store", NOWHERE)
                assert reason in _REASONS
            told[tenant.namespace] += sum(blocks for _, blocks in tenant.hits)
            told[tenant.namespace] += sum(blocks for _, _, blocks in tenant.misses)
        for state in self.core._requests.values():
            if state.lookup is not None:
                told[state.request.namespace] += len(state.lookup.missing)
        assert +told == +self.looked, "a block that was looked for is neither found nor explained"

    def everything(self) -> None:
        """But for pins and erasures, which have a past."""
        self.core.check_integrity()
        for state in self.core.scheduler.running:
            assert len(state.table) * BLOCK >= state.computed
        self.contents()
        self.charges()
        self.transfers()
        self.lookups()
