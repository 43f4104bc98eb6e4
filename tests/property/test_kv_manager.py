"""The KV manager against a naive model: dictionaries and lists, searched from end to end.

Sequences with real tokens run on both. After every step the answers, the states of all blocks and the whole
queue of victims must be equal, `check_integrity` must hold, and a simulated pool must still contain, in every
block of every table, exactly the tokens that its sequence wrote: two owners of one block would show there. The same
again with quotas that change at run time, and pins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from lamina_kvtier import (
    BlockMisuse,
    BlockUsage,
    CopyOnWrite,
    IdentityChain,
    KvError,
    KvManager,
    OutOfBlocks,
    OverLimit,
    Quota,
    QuotaBook,
    QuotaNotCoverable,
)

BLOCK_SIZE = 2
OWNERS = {b"\x0a" * 32: "a", b"\x0b" * 32: "b", b"\x0c" * 32: "c"}
ROOTS = tuple(OWNERS)
MAX_BLOCKS = 12
POISON = ("poison",)
EVICTED: Counter[str] = Counter()  # runs of the machines with quotas in which somebody lost a block, by reason


class NaiveManager:
    """What the manager means, in the plainest words."""

    def __init__(self, num_blocks: int, book: QuotaBook | None = None) -> None:
        self.book = book
        self.owner: dict[int, str] = {}  # of blocks that are not free, if there are quotas
        self.pins: Counter[tuple[str, bytes]] = Counter()
        self.leased: list[int] = []  # pinned and held by nobody
        self.evictions: Counter[tuple[str, str]] = Counter()
        self.held = dict.fromkeys(range(num_blocks), 0)
        self.known: dict[bytes, int] = {}
        self.free = list(range(num_blocks))  # next one first
        self.cached: list[int] = []  # least recently used first
        self.hit_blocks = self.evicted_blocks = 0

    @property
    def available(self) -> int:
        return len(self.free) + len(self.cached)

    def usage(self) -> BlockUsage:
        active = sum(count > 0 for count in self.held.values())
        leased = len(self.leased)
        cached = len(self.cached) + leased
        return BlockUsage(total=len(self.held), free=len(self.free), active=active, cached=cached, pinned=leased)

    def identity_of(self, block: int) -> bytes | None:
        return next((identity for identity, owner in self.known.items() if owner == block), None)

    def match(self, ids: list[bytes]) -> int:
        return next((at for at, identity in enumerate(ids) if identity not in self.known), len(ids))

    def acquire(self, ids: list[bytes]) -> list[int]:
        blocks = [self.known[identity] for identity in ids[: self.match(ids)]]
        for block in blocks:
            if self.held[block] == 0:
                (self.leased if block in self.leased else self.cached).remove(block)
            self.held[block] += 1
        self.hit_blocks += len(blocks)
        return blocks

    def allocate(self, count: int, *, owner: str = "") -> list[int]:
        if count < 0:
            raise BlockMisuse("negative")
        if self.book is None or not self.book.loaded:
            if count > self.available:
                raise OutOfBlocks(count, self.available)
        elif self.limit(owner) - self.firm(owner) < count and self.limit(owner) < len(self.held):
            raise OverLimit(
                owner, limit=0, need=count, have=max(0, self.limit(owner) - self.firm(owner)), retry_after_s=None
            )
        elif self.obtainable(owner) < count:
            raise OutOfBlocks(count, self.obtainable(owner))
        return [self.take(owner) for _ in range(count)]

    def obtainable(self, owner: str) -> int:
        """Tries it out."""
        trial = deepcopy(self)
        for had in range(len(self.held) + 1):
            if not trial.make_free(owner):
                return had
            trial.take(owner)
        raise AssertionError

    def take(self, owner: str) -> int:
        assert self.make_free(owner)
        block = self.free.pop(0)
        self.held[block] = 1
        if self.book is not None:
            self.owner[block] = owner
        return block

    def make_free(self, owner: str) -> bool:
        """Evicts what the rules name, if something has to go; False if they name nothing."""
        if self.book is None or not self.book.loaded:
            if not self.free and self.cached:
                self.evict(self.cached[0], "lru")
            return bool(self.free)
        while self.limit(owner) < len(self.held) and self.usage_of(owner) >= self.limit(owner) and self.idle(owner):
            self.evict(self.idle(owner)[0], "limit")
        over = [
            (-(self.usage_of(name) - self.book.of(name).reserved) / self.book.of(name).weight, name)
            for name in set(self.owner.values())
            if self.idle(name) and self.usage_of(name) > self.book.of(name).reserved
        ]
        if not self.free and over:
            self.evict(self.idle(min(over)[1])[0], "over_share")
        elif not self.free and self.idle(owner):
            self.evict(self.idle(owner)[0], "own")
        return bool(self.free)

    def evict(self, block: int, reason: str) -> None:
        self.known = {identity: known for identity, known in self.known.items() if known != block}
        self.cached.remove(block)
        self.to_free(block)
        self.evicted_blocks += 1
        self.evictions[self.owner_of(block), reason] += 1
        self.owner.pop(block, None)

    def to_free(self, block: int) -> None:
        self.free.insert(0, block)

    def owner_of(self, block: int) -> str:
        return self.owner.get(block, "")

    def limit(self, owner: str) -> int:
        assert self.book is not None
        return self.book.of(owner).limit

    def usage_of(self, owner: str) -> int:
        return sum(name == owner for name in self.owner.values())

    def idle(self, owner: str) -> list[int]:
        """Oldest first."""
        return [block for block in self.cached if self.owner_of(block) == owner]

    def firm(self, owner: str) -> int:
        return self.usage_of(owner) - len(self.idle(owner))

    def available_to(self, owner: str) -> int:
        if self.book is None or not self.book.loaded:
            return self.available
        return max(0, min(self.limit(owner) - self.firm(owner), self.obtainable(owner)))

    def is_pinned(self, block: int) -> bool:
        identity = self.identity_of(block)
        return identity is not None and self.pins[self.owner_of(block), identity] > 0

    def pin(self, ids: list[bytes], owner: str = "") -> None:
        self.pins.update((owner, identity) for identity in ids)
        self.leased += [block for block in self.cached if self.is_pinned(block)]
        self.cached = [block for block in self.cached if not self.is_pinned(block)]

    def unpin(self, ids: list[bytes], owner: str = "") -> None:
        self._need(all(self.pins[owner, identity] >= ids.count(identity) for identity in ids))
        for identity in ids[::-1]:
            self.pins[owner, identity] -= 1
            block = self.known.get(identity)
            if block in self.leased and not self.is_pinned(block):
                self.leased.remove(block)
                self.cached.append(block)

    def fork(self, blocks: list[int]) -> None:
        self._need(all(self.held.get(block, 0) > 0 for block in blocks))
        for block in blocks:
            self.held[block] += 1

    def make_writable(self, block: int) -> CopyOnWrite | None:
        self._need(self.held.get(block, 0) > 0)
        if self.held[block] == 1 and self.identity_of(block) is None:
            return None
        (target,) = self.allocate(1, owner=self.owner_of(block))
        self.release([block])
        return CopyOnWrite(block, target)

    def publish(self, block: int, identity: bytes) -> int:
        self._need(self.held.get(block, 0) > 0)
        self._need(self.identity_of(block) in (None, identity))
        return self.known.setdefault(identity, block)

    def release(self, blocks: list[int]) -> None:
        self._need(all(self.held.get(block, 0) >= blocks.count(block) for block in blocks))
        for block in blocks[::-1]:
            self.held[block] -= 1
            if self.held[block] == 0 and self.identity_of(block) is None:
                self.to_free(block)
                self.owner.pop(block, None)
            elif self.held[block] == 0 and self.is_pinned(block):
                self.leased.append(block)
            elif self.held[block] == 0:
                self.cached.append(block)

    def forget(self, ids: list[bytes]) -> int:
        blocks = [self.known.pop(identity) for identity in ids if identity in self.known]
        for block in blocks:
            if self.held[block] == 0:
                (self.leased if block in self.leased else self.cached).remove(block)
                self.to_free(block)
                self.owner.pop(block, None)
        return len(blocks)

    def drop_cached(self) -> int:
        dropped = len(self.cached)
        self.known = {identity: block for identity, block in self.known.items() if block not in self.cached}
        self.free += self.cached
        self.owner = {block: owner for block, owner in self.owner.items() if block not in self.cached}
        self.cached = []
        return dropped

    @staticmethod
    def _need(rule_kept: bool) -> None:
        if not rule_kept:
            raise BlockMisuse("broken rule")


@dataclass(eq=False)
class Sequence:
    """One choice: its tokens, its block table and the identities of its full blocks."""

    root: bytes
    tokens: list[int]
    chain: IdentityChain
    table: list[int] = field(default_factory=list)

    def contents(self, at: int) -> Any:
        """What block `at` of the table has to contain: its tokens, which depend on all before them."""
        return (self.root, tuple(self.tokens[: (at + 1) * BLOCK_SIZE]))

    @property
    def full(self) -> int:
        return len(self.chain.ids)


def outcome(call: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What a call returns or refuses with."""
    try:
        return call(*arguments, **named)
    except KvError as refusal:
        return refusal


def chain_of(root: bytes, tokens: list[int]) -> IdentityChain:
    chain = IdentityChain(root, BLOCK_SIZE)
    chain.extend(tokens)
    return chain


roots = st.sampled_from(ROOTS)
prompts = st.lists(st.integers(0, 1), max_size=9)
places = st.integers(0, 20)


@st.composite
def quotas_of(draw: st.DrawFn) -> Quota:
    reserved = draw(st.integers(0, 5))
    return Quota(
        reserved=reserved,
        limit=reserved + draw(st.integers(0, MAX_BLOCKS)),
        pin_limit=draw(st.integers(0, reserved)),
        weight=draw(st.sampled_from([0.5, 1, 3])),
    )


quotas = quotas_of()
policies_of_some = st.dictionaries(st.sampled_from(list(OWNERS.values())), quotas)


class KvMachine(RuleBasedStateMachine):
    """Every operation in any order, on a pool that is too small."""

    sequences = Bundle("sequences")

    @initialize(num_blocks=st.integers(1, MAX_BLOCKS))
    def start(self, num_blocks: int) -> None:
        self.real = KvManager(num_blocks, BLOCK_SIZE)
        self.naive = NaiveManager(num_blocks)
        self.pool: list[Any] = [POISON] * num_blocks
        self.alive: list[Sequence] = []

    # Both worlds at once

    def both(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Calls both; answers and refusals must be equal. Returns or raises them."""
        real = outcome(getattr(self.real, method), arguments, named)
        naive = outcome(getattr(self.naive, method), arguments, named)
        if isinstance(real, KvError):
            assert type(real) is type(naive), (method, arguments, naive)
            assert getattr(real, "need", None) == getattr(naive, "need", None)
            assert getattr(real, "have", None) == getattr(naive, "have", None)
            raise real
        assert real == naive, (method, arguments)
        return real

    def owned(self, root: bytes) -> dict[str, str]:
        """How to say whose block it is to be."""
        return {}

    def allocate(self, count: int, root: bytes) -> list[int]:
        blocks: list[int] = self.both("allocate", count, **self.owned(root))
        for block in blocks:
            self.pool[block] = POISON
        return blocks

    def make_writable(self, sequence: Sequence, at: int) -> None:
        copy = self.both("make_writable", sequence.table[at])
        if copy is not None:
            self.pool[copy.target] = self.pool[copy.source]
            sequence.table[at] = copy.target

    def publish(self, sequence: Sequence, at: int, *, adopt: bool) -> None:
        block, identity = sequence.table[at], sequence.chain.ids[at]
        canonical = self.both("publish", block, identity)
        if canonical != block and adopt:
            assert self.both("acquire", [identity]) == [canonical]
            self.both("release", [block])
            sequence.table[at] = canonical

    # A sequence's life

    @rule(target=sequences, root=roots, prompt=prompts, publish=st.booleans(), adopt=st.booleans())
    def begin(self, root: bytes, prompt: list[int], publish: bool, adopt: bool) -> Any:
        """Takes the known prefix, computes the rest, perhaps publishes it."""
        sequence = self.started(root, prompt, publish, adopt)
        return multiple() if sequence is None else sequence

    @rule(work=st.lists(st.tuples(roots, st.lists(st.integers(0, 1), min_size=2, max_size=9)), min_size=1, max_size=4))
    def serve(self, work: list[tuple[bytes, list[int]]]) -> None:
        """Whole requests, one after the other: they fill the cache, hit it and evict."""
        for root, prompt in work:
            sequence = self.started(root, prompt, True, True)
            if sequence is not None:
                self.finish(sequence)

    def started(self, root: bytes, prompt: list[int], publish: bool, adopt: bool) -> Sequence | None:
        sequence = Sequence(root, prompt, chain_of(root, prompt))
        known = self.both("acquire", sequence.chain.ids)
        missing = -(-len(prompt) // BLOCK_SIZE) - len(known)
        try:
            sequence.table = known + self.allocate(missing, root)
        except OutOfBlocks:
            self.both("release", known)
            return None
        for at in range(len(known), len(sequence.table)):
            self.pool[sequence.table[at]] = sequence.contents(at)
        self.alive.append(sequence)
        if publish or self.closed:
            for at in range(len(known), sequence.full):
                self.publish(sequence, at, adopt=adopt or self.closed)
        return sequence

    @rule(sequence=sequences, token=st.integers(0, 1), publish=st.booleans(), adopt=st.booleans())
    def append(self, sequence: Sequence, token: int, publish: bool, adopt: bool) -> None:
        """One decode step: a new block when the last is full, else a write into the last one."""
        at = len(sequence.tokens) // BLOCK_SIZE
        try:
            if at == len(sequence.table):
                sequence.table += self.allocate(1, sequence.root)
            else:
                self.make_writable(sequence, at)
        except OutOfBlocks:
            return
        sequence.tokens = [*sequence.tokens, token]
        sequence.chain.extend([token])
        self.pool[sequence.table[at]] = sequence.contents(at)
        if (publish or self.closed) and at < sequence.full:
            self.publish(sequence, at, adopt=adopt or self.closed)

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: Sequence) -> Sequence:
        """A second choice on the same blocks, the partial one included."""
        self.both("fork", sequence.table)
        twin = Sequence(sequence.root, sequence.tokens, sequence.chain.copy(), sequence.table.copy())
        self.alive.append(twin)
        return twin

    @rule(sequence=consumes(sequences))
    def finish(self, sequence: Sequence) -> None:
        self.both("release", sequence.table)
        self.alive.remove(sequence)

    @precondition(lambda self: not self.closed)
    @rule(sequence=sequences, place=places, adopt=st.booleans())
    def publish_late(self, sequence: Sequence, place: int, adopt: bool) -> None:
        """Blocks may be published in any order, and again."""
        if sequence.full:
            self.publish(sequence, place % sequence.full, adopt=adopt)

    @precondition(lambda self: not self.closed)
    @rule(sequence=sequences, place=places)
    def recompute(self, sequence: Sequence, place: int) -> None:
        """Writes the same tokens again into any block, shared and published ones included."""
        if sequence.table:
            at = place % len(sequence.table)
            try:
                self.make_writable(sequence, at)
            except OutOfBlocks:
                return
            self.pool[sequence.table[at]] = sequence.contents(at)

    # The cache as a whole

    @rule(root=roots, prompt=prompts)
    def match(self, root: bytes, prompt: list[int]) -> None:
        self.both("match", chain_of(root, prompt).ids)

    @precondition(lambda self: not self.closed)
    @rule(root=roots, prompt=prompts, places=st.lists(places, max_size=3))
    def forget(self, root: bytes, prompt: list[int], places: list[int]) -> None:
        ids = chain_of(root, prompt).ids
        self.both("forget", [ids[place % len(ids)] for place in places] if ids else [])

    @rule()
    def drop_cached(self) -> None:
        self.both("drop_cached")

    # Misuse: equal refusals, and the invariants below show that nothing changed

    @rule(block=st.integers(-2, MAX_BLOCKS + 1), times=st.integers(1, 3))
    def release_too_often(self, block: int, times: int) -> None:
        held = self.naive.held.get(block, 0)
        with pytest.raises(BlockMisuse):
            self.both("release", [block] * (held + times))

    @rule(sequence=sequences, block=st.integers(-2, MAX_BLOCKS + 1))
    def touch_an_unheld_block(self, sequence: Sequence, block: int) -> None:
        if self.naive.held.get(block, 0) == 0:
            for method, argument in (
                ("fork", [*sequence.table, block]),
                ("release", [*sequence.table, block]),
                ("make_writable", block),
            ):
                with pytest.raises(BlockMisuse):
                    self.both(method, argument)
            with pytest.raises(BlockMisuse):
                self.both("publish", block, b"\x0d" * 32)

    @rule(sequence=sequences, place=places)
    def rename_a_published_block(self, sequence: Sequence, place: int) -> None:
        if sequence.table:
            block = sequence.table[place % len(sequence.table)]
            if self.naive.identity_of(block) is not None:
                with pytest.raises(BlockMisuse):
                    self.both("publish", block, b"\x0d" * 32)

    @rule(more=st.integers(1, 3))
    def ask_for_too_many(self, more: int) -> None:
        with pytest.raises(OutOfBlocks):
            self.both("allocate", self.naive.available + more)
        with pytest.raises(BlockMisuse):
            self.both("allocate", -more)

    # What must hold after every step

    closed = False  # see ClosedKvMachine

    @invariant()
    def bookkeeping_is_sound(self) -> None:
        self.real.check_integrity([sequence.table for sequence in self.alive])

    @invariant()
    def both_worlds_agree(self) -> None:
        assert self.real.usage() == self.naive.usage()
        assert self.real.available == self.naive.available
        assert list(self.real._unheld) == self.naive.free + self.naive.cached
        assert self.real._index._blocks == self.naive.known
        counters = (self.real.hit_blocks, self.real.evicted_blocks)
        assert counters == (self.naive.hit_blocks, self.naive.evicted_blocks)

    @invariant()
    def every_table_still_holds_its_own_tokens(self) -> None:
        for sequence in self.alive:
            for at, block in enumerate(sequence.table):
                assert self.pool[block] == sequence.contents(at), (sequence, at)

    def teardown(self) -> None:
        """When all sequences end, nothing leaks."""
        if hasattr(self, "real"):
            for sequence in self.alive:
                self.both("release", sequence.table)
            self.real.check_integrity([])
            self.real.drop_cached()
            assert self.real.usage().free == self.real.num_blocks


class QuotaKvMachine(KvMachine):
    """Each root's blocks are charged to its namespace; policy arrives late and changes; prefixes are pinned."""

    @initialize(
        num_blocks=st.integers(1, 8),
        headroom=st.sampled_from([0, 0, 0, 1]),
        shares=st.sampled_from([(1, 1, 1), (2, 1, 0), (1, 0, 0), (0, 0, 0), None]),
        more=st.integers(0, 3),
        late=st.integers(0, 12),
    )
    def start(self, num_blocks: int, headroom: int, shares: tuple[int, ...] | None, more: int, late: int) -> None:
        """Policy is there (most often promising all that there is), or arrives after `late` rounds of work."""
        self.book = QuotaBook(num_blocks, min(headroom, num_blocks))
        self.real = KvManager(num_blocks, BLOCK_SIZE, quotas=self.book)
        self.naive = NaiveManager(num_blocks, self.book)
        self.pool = [POISON] * num_blocks
        self.alive = []
        self.pinned: list[tuple[list[bytes], str]] = []
        self.late, self.fresh = late, 2  # 0 and 1 are the tokens of prompts that are asked for again
        if shares is not None:
            parts = [self.book.coverable * share // max(sum(shares), 1) for share in shares]
            policies = {
                name: Quota(part, part + more, part // 2) for name, part in zip(OWNERS.values(), parts, strict=True)
            }
            self.load_policies(policies)

    def owned(self, root: bytes) -> dict[str, str]:
        return {"owner": OWNERS[root]}

    @rule(roots=st.lists(roots, min_size=1, max_size=4), blocks=st.integers(1, 8))
    def flood(self, roots: list[bytes], blocks: int) -> None:
        """Prompts that nobody asked for before, one after the other."""
        for root in roots:
            self.ask_new(root, blocks)

    @precondition(lambda self: self.book.loaded)
    @rule(root=roots, beyond=st.integers(1, 3))
    def use_all_that_is_reserved(self, root: bytes, beyond: int) -> None:
        """Everybody fills their reservation, then somebody wants more: once that is all there is, its own blocks go."""
        for owner in ROOTS:
            self.ask_new(owner, self.book.of(OWNERS[owner]).reserved)
        self.ask_new(root, beyond)

    def ask_new(self, root: bytes, blocks: int) -> None:
        for _ in range(blocks):
            sequence = self.started(root, [self.fresh] * BLOCK_SIZE, True, True)
            self.fresh += 1
            if sequence is not None:
                self.finish(sequence)
        self.late = max(0, self.late - 1)

    @precondition(lambda self: self.book.loaded or self.late == 0)
    @rule(policies=policies_of_some)
    def load_policies(self, policies: dict[str, Quota]) -> None:
        """All or nothing."""
        before = self.book.loaded, self.book.policies()
        if sum(quota.reserved for quota in policies.values()) <= self.book.capacity - self.book.headroom:
            self.book.load(policies)
        else:
            with pytest.raises(QuotaNotCoverable):
                self.book.load(policies)
            assert (self.book.loaded, self.book.policies()) == before

    @precondition(lambda self: self.book.loaded)
    @rule(owner=st.sampled_from(list(OWNERS.values())), quota=quotas | st.none())
    def change_a_policy(self, owner: str, quota: Quota | None) -> None:
        if quota is None:
            self.book.remove(owner)
            return
        before = self.book.policies()
        after = {**before, owner: quota}
        if sum(quota.reserved for quota in after.values()) <= self.book.capacity - self.book.headroom:
            self.book.set(owner, quota)
        else:
            with pytest.raises(QuotaNotCoverable):
                self.book.set(owner, quota)
            assert self.book.policies() == before

    @rule(root=roots, prompt=prompts)
    def pin(self, root: bytes, prompt: list[int]) -> None:
        """Known blocks or not, known ones held or not."""
        ids = chain_of(root, prompt).ids
        self.both("pin", ids, OWNERS[root])
        self.pinned.append((ids, OWNERS[root]))

    @precondition(lambda self: self.pinned)
    @rule(place=places)
    def unpin(self, place: int) -> None:
        self.both("unpin", *self.pinned.pop(place % len(self.pinned)))

    @rule(root=roots, prompt=prompts)
    def unpin_too_often(self, root: bytes, prompt: list[int]) -> None:
        ids, owner = chain_of(root, prompt).ids, OWNERS[root]
        for identity in ids[:1]:
            with pytest.raises(BlockMisuse):
                self.both("unpin", [identity] * (self.naive.pins[owner, identity] + 1), owner)

    @invariant()
    def charges_agree(self) -> None:
        assert self.real.evictions() == self.naive.evictions
        for owner in (*OWNERS.values(), ""):
            assert self.real.ledger is not None
            assert self.real.ledger.usage(owner) == self.naive.usage_of(owner)
            assert self.real.available_to(owner) == self.naive.available_to(owner)
        for block in self.naive.held:
            assert self.real.owner_of(block) == self.naive.owner.get(block)
            assert self.real.is_pinned(block) == self.naive.is_pinned(block)

    def teardown(self) -> None:
        if hasattr(self, "real"):
            for ids, owner in self.pinned:
                self.both("unpin", ids, owner)
            for reason in {reason for _, reason in self.real.evictions()}:
                event(f"evicted: {reason}")  # pytest --hypothesis-show-statistics
                EVICTED[reason] += 1
        super().teardown()


class Closed:
    """Sequences that publish in order and adopt canonical blocks, as the engine's do."""

    closed = True
    pool: list[Any]
    real: KvManager
    naive: NaiveManager

    @invariant()
    def known_prefixes_have_no_gaps(self) -> None:
        """No eviction order ever takes a block whose successor stays: every known block can be found."""
        reachable = set()
        for root, tokens in {content for content in self.pool if content != POISON}:
            ids = chain_of(root, list(tokens)).ids
            reachable |= set(ids[: self.real.match(ids)])
        assert reachable >= set(self.naive.known)


class ClosedKvMachine(Closed, KvMachine):
    """Without quotas."""


class ClosedQuotaKvMachine(Closed, QuotaKvMachine):
    """With quotas and pins."""


TestKvMachine = KvMachine.TestCase
TestKvMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestClosedKvMachine = ClosedKvMachine.TestCase
TestClosedKvMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestQuotaKvMachine = QuotaKvMachine.TestCase
TestQuotaKvMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestClosedQuotaKvMachine = ClosedQuotaKvMachine.TestCase
TestClosedQuotaKvMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_the_machines_evict_for_every_reason() -> None:
    """A rule that no run comes to is not proved by any number of runs. Counts those of the machines above."""
    if EVICTED:  # nothing if this test runs alone
        assert min(EVICTED[reason] for reason in ("limit", "over_share", "own", "lru")) >= 5, EVICTED
