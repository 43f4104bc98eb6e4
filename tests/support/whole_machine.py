"""Manager, ledger, pins, host memory, store and everything that moves blocks between them: one machine over all of it.

The engine is the real one, but for a model that is a hash (`support/simulated.py`): scheduler, admission, prefix
look-up, commons, erasure, explainer, and the tiers with their spills, puts, renewals, saves, lifts and fetches. Copies
and the store's work happen when the machine lets them, in any order, and fail when it says so (`support/whole.py`).

Modelled, naively, and compared after every rule:

    contents    what lies under an identity is a function of namespace, adapter and tokens; known is at most what was
                ever computed; what was erased is known nowhere, once nothing can bring it back
    tables      each block of the pool is free, cached, or in as many tables as it has references
    charges     blocks, slots and bytes of each namespace, counted one by one; together they are what is used
    promises    (as it happens, in `support/whole.py`) who loses what to whom, beside what was reserved
    pins        never above the pin limit; what a floor keeps stays there
    transfers   what is read or written by one is neither free, nor found before it has come, nor anybody else's
    lookups     each block that a prompt looked for was found, is missed for a reason, or is still to be told

At the end the store is well, everything ends, and each request has said what it would have said alone.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fixtures.engines import collect, request
from lamina.engine.commons import Commons
from lamina.engine.request import Choice
from lamina.errors import ContextLengthExceeded, EngineOverloaded, ExceedsQuota, LimitExceeded, QuotaNotCoverable
from lamina.types import FinishReason, GenerationRequest, PinOrder, PinRecord, QuotaPolicy, TierQuota
from lamina_kvtier.identity import BlockId
from lamina_kvtier.pin_types import Floor
from lamina_kvtier.tier import adapter_bytes
from support.fixed_rates import HandClock
from support.simulated import BLOCK, BLOCK_BYTES, Content, continuation, simulated_core
from support.whole import MOODS, PACES, VALUE_BYTES, WatchedStore, WholeBelow, small_windows
from support.whole_rules import WholeRules

__all__ = ["MovingMachine", "WholeMachine"]

TENANTS = ("a", "b", "c")
TTL_S = 40.0  # of the store's blocks

tenants = st.sampled_from(TENANTS)
lengths = st.sampled_from([3, 9, 14, 21, 21])
seeds = st.integers(0, 1)
adapters = st.sampled_from([False, False, False, True])


@dataclass(frozen=True)
class Wish:
    """A request, before it is known what its tenant and adapter are called."""

    tenant: str
    seed: int
    length: int
    adapter: bool
    count: int
    most: int


wishes = st.builds(
    Wish,
    tenant=tenants,
    seed=seeds,
    length=lengths,
    adapter=adapters,
    count=st.sampled_from([1, 1, 1, 2, 3]),
    most=st.sampled_from([1, 4, 9]),
)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Shorter ones are the beginning of longer ones."""
    return tuple(random.Random(seed).choices(range(3, 8), k=length))


@st.composite
def quotas(draw: st.DrawFn, most: int, unit: int = 1, *, pins: bool = True) -> TierQuota:
    reserved = draw(st.integers(0, most)) * unit
    more = draw(st.none() | st.integers(0, 10))
    return TierQuota(
        reserved=reserved,
        limit=None if more is None else reserved + more * unit,
        pin_limit=draw(st.integers(0, reserved)) if pins else 0,
    )


class WholeMachine(RuleBasedStateMachine):
    """Three tenants, each with the base model and an adapter. Who is erased comes back under a new name."""

    @initialize(
        blocks=st.integers(8, 14),
        host=st.integers(3, 24),
        store=st.integers(6, 60),
        chunk=st.sampled_from([4, 8, 24]),
        pace=st.sampled_from(sorted(PACES)),
        ahead=st.booleans(),
        promised=st.sampled_from([True, True, False]),
        seed=st.integers(0, 3),
        first=st.lists(wishes, min_size=1, max_size=3),
    )
    def start(
        self,
        blocks: int,
        host: int,
        store: int,
        chunk: int,
        pace: str,
        ahead: bool,
        promised: bool,
        seed: int,
        first: list[Wish],
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        for place, bound in small_windows():
            self.patch.setattr(place, bound)
        self.blocks, self.host, self.chunk, self.pace, self.ahead, self.seed = blocks, host, chunk, pace, ahead, seed
        self.clock = HandClock()
        self.store = WatchedStore(store * VALUE_BYTES, ttl_s=TTL_S, clock=self.clock)
        self.written: dict[BlockId, Content] = {}
        self.generation: Counter[str] = Counter()
        self.gone: dict[str, bool] = {}  # erased namespaces, and whether the store must have heard of it
        self.gone_adapters: set[bytes] = set()
        self.requests: dict[str, GenerationRequest] = {}
        self.excused: set[str] = set()  # those that may end in any way
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.endings: dict[tuple[str, int], FinishReason] = {}
        self.records: list[PinRecord] = []
        self.policies: list[QuotaPolicy] = []
        self.boot(promised)
        if promised:
            gpu, below = blocks // 4, host // 4
            each = TierQuota(reserved=gpu, pin_limit=gpu)
            slots = TierQuota(reserved=below * BLOCK_BYTES, pin_limit=below * BLOCK_BYTES)
            bytes_ = TierQuota(reserved=store // 4 * VALUE_BYTES)
            self.set_policies([self.policy(tenant, each, slots, bytes_, 1.0) for tenant in TENANTS])
        self.use(first, calmly=True)

    def boot(self, promised: bool) -> None:
        """An engine with empty memory, on the store as it is."""
        self.below = WholeBelow(self.clock, self.store, host=self.host, seed=self.seed, pace=self.pace, ttl_s=TTL_S)
        self.core, self.model = simulated_core(
            self.below,
            self.written,
            ahead=self.ahead,
            num_blocks=self.blocks,
            max_batch_tokens=self.chunk,
            max_running=4,
            max_waiting=12,
        )
        self.model.may_not_write = self.below.late_mover.still_reads
        self.core.commons = Commons(self.core.scheduler.kv, self.core._root, self.below.tiers, clock=self.clock)
        self.rules = WholeRules(self.core, self.model, self.below, self.store, self.written)
        self.core.scheduler.prefix_found = self.looked_up
        self.kept: set[tuple[Floor, str, BlockId]] = set()

    def looked_up(self, choice: Choice) -> None:
        self.rules.looked[choice.request.request.namespace] += len(choice.known_ids(BLOCK))
        self.core._prefix_found(choice)

    def name(self, tenant: str) -> str:
        return f"{tenant}{self.generation[tenant]}"

    def adapter(self, wanted: bool) -> str | None:
        return f"{1 + self.generation['adapter']:064x}" if wanted else None

    # --- requests -----------------------------------------------------------------------------------------

    @rule(wanted=st.lists(wishes, min_size=1, max_size=4), calmly=st.booleans())
    def use(self, wanted: list[Wish], calmly: bool) -> None:
        """Calmly: copies and store keep up, so that there is something to find in all tiers."""
        for wish in wanted:
            self.ask(wish)
        if calmly:
            self.goes_well(12)
        else:
            self.step(2)

    @rule(
        wanted=st.lists(wishes, min_size=1, max_size=2),
        lost=st.sampled_from(["device", "engine"]),
        damage=st.sampled_from([None, None, False, True]),
        then=st.sampled_from(["goes well", "cancel", "erase", "crowd", "nothing"]),
    )
    def come_back(self, wanted: list[Wish], lost: str, damage: bool | None, then: str) -> None:
        """The same again, when what there is lies below: in the store as it was, or with a bit turned, or cut. And
        something happens while it is on its way up."""
        self.use(wanted, calmly=True)
        if lost == "engine":
            self.restart(promised=True, pins_first=True)
            for place in range(0 if damage is None else len(self.store)):
                self.store_is_damaged(place, cut=bool(damage))
        else:
            self.below.kv.drop_cached()
        for wish in wanted:
            self.ask(wish)
        for _ in range(2):
            self.step(1)
            self.below.store_works(20, 0)
        self.meanwhile(then, wanted[0])

    def meanwhile(self, what: str, wish: Wish) -> None:
        if what == "goes well":
            self.goes_well(4)
        elif what == "cancel" and self.requests:
            self.cancel(0)
        elif what == "erase":
            self.erase_tenant(wish.tenant) if not wish.adapter else self.erase_adapter()
        elif what == "crowd":
            for tenant in TENANTS:
                self.ask(replace(wish, tenant=tenant, length=21, count=3, most=9))

    def ask(self, wish: Wish) -> None:
        item = request(
            f"r{len(self.requests)}",
            prompt(wish.seed, wish.length),
            tenant=self.name(wish.tenant),
            adapter=self.adapter(wish.adapter),
            n=wish.count,
            max_tokens=wish.most,
            seed=wish.seed,
        )
        try:
            self.core.submit(item)
        except (ExceedsQuota, LimitExceeded, EngineOverloaded, ContextLengthExceeded):
            return  # it could never fit, or too many wait
        self.requests[item.request_id] = item

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            collect(self.core.step(), self.tokens, self.endings)
            self.core.check_integrity()
        if not self.core.has_work():
            self.core.idle()

    def step_fails(self) -> None:
        """In the middle of writing; the requests that were in it end."""
        before = set(self.endings)
        self.model.fails = self.core.has_work()
        self.step(1)
        self.model.fails = False
        ended = {key for key in set(self.endings) - before if self.endings[key] is FinishReason.ERROR}
        self.excused |= {name for name, _ in ended}
        self.kept.clear()  # what it computed is forgotten, pinned or not

    @precondition(lambda self: self.requests)
    @rule(place=st.integers(0, 50))
    def cancel(self, place: int) -> None:
        name = list(self.requests)[-1 - place % len(self.requests)]
        self.core.cancel(name)
        self.excused.add(name)

    # --- what runs beside ---------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(["up", "down", "store", "all"]),
        count=st.integers(1, 4),
        dice=st.integers(0, 3),
        failing=st.sampled_from([False, False, True]),
    )
    def beside(self, what: str, count: int, dice: int, failing: bool) -> None:
        """Some copies run, and those that are asked for from now on will fail, or will not; or the store does some of
        its work, in any order; or all keep up with a few steps."""
        if what == "store":
            self.below.store_works(count, dice)
        elif what == "all":
            self.goes_well(count)
        else:
            lane = self.below.promotions if what == "up" else self.below.spills
            lane.run(count)
            lane.failing = failing

    def goes_well(self, steps: int) -> None:
        for _ in range(steps):
            self.step(1)
            self.below.spills.run(9)
            self.below.promotions.run(9)
            self.below.store_works(20, 0)

    @rule(mood=st.sampled_from(["sound", "sound", "is away", *MOODS]))
    def store_mood(self, mood: str) -> None:
        self.below.set_mood(mood)
        if mood == "is away" and self.core.commons.erasure.is_pending:
            self.gone = dict.fromkeys(self.gone, False)

    def store_is_damaged(self, place: int, cut: bool) -> None:
        """One value of it, for good."""

        def change(data: bytes) -> bytes:
            return data[:-5] if cut else bytes([*data[:-9], data[-9] ^ 4, *data[-8:]])

        if len(self.store):
            self.store.damage(place, change)

    @rule(seconds=st.sampled_from([0.5, 0.5, 2.0, 5.0, 15.0, TTL_S]))
    def time_passes(self, seconds: float) -> None:
        self.below.pass_time(seconds)
        self.core.commons.expire()

    # --- what operators and tenants want ------------------------------------------------------------------

    def policy(self, tenant: str, gpu: TierQuota, host: TierQuota, store: TierQuota, weight: float) -> QuotaPolicy:
        return QuotaPolicy(namespace=self.name(tenant), weight=weight, gpu=gpu, host=host, store=store)

    @rule(data=st.data())
    def set_quotas(self, data: st.DataObject) -> None:
        """Also those that promise too much: they change nothing."""
        names = data.draw(st.sets(tenants))
        wanted = [
            self.policy(
                tenant,
                data.draw(quotas(6)),
                data.draw(quotas(3, BLOCK_BYTES)),
                data.draw(quotas(8, VALUE_BYTES, pins=False)),
                data.draw(st.sampled_from([1.0, 3.0])),
            )
            for tenant in sorted(names)
        ]
        before = self.core.commons.report()
        tier = self.not_covered(wanted)
        if tier is None:
            self.set_policies(wanted)
            return
        with pytest.raises(QuotaNotCoverable) as refusal:
            self.core.commons.set_quotas(wanted)
        assert refusal.value.tier == tier
        assert self.core.commons.report() == before

    def set_policies(self, wanted: list[QuotaPolicy]) -> None:
        self.core.commons.set_quotas(wanted)
        self.policies = wanted
        for name, item in self.requests.items():
            if any((name, index) not in self.endings for index in range(item.sampling.n)):
                self.excused.add(name)  # it may be one that fits no more

    def not_covered(self, wanted: list[QuotaPolicy]) -> str | None:
        """The first tier that these promise more of than there is."""
        if sum(policy.gpu.reserved for policy in wanted) > self.blocks - min(4, self.blocks // 8):
            return "gpu"
        if sum(policy.host.reserved for policy in wanted) > (self.host - self.host // 8) * BLOCK_BYTES:
            return "host"
        return "store" if sum(policy.store.reserved for policy in wanted) > (self.store.limit or 0) else None

    @rule(tenant=tenants, seed=seeds, length=lengths, adapter=adapters, floor=st.sampled_from(Floor))
    def pin(self, tenant: str, seed: int, length: int, adapter: bool, floor: Floor) -> None:
        order = PinOrder(
            namespace=self.name(tenant),
            token_ids=prompt(seed, length),
            adapter=self.adapter(adapter),
            floor=floor.value,
            ttl_s=12.0,
            hard_max_s=40.0,
        )
        answer = self.core.commons.pin(order)
        if answer.pin is None:
            assert answer.reason in ("pin_limit", "no_full_block", "policy_not_loaded")
            return
        assert answer.pin.blocks + answer.pin.clipped_blocks == length // BLOCK
        state = answer.pin
        granted = replace(order, token_ids=order.token_ids[: state.blocks * BLOCK])
        self.records.append(
            PinRecord(pin_id=state.pin_id, order=granted, created_at=state.created_at, expires_at=state.expires_at)
        )

    @precondition(lambda self: self.core.commons._pins.listing())
    @rule(place=st.integers(0, 9), renew=st.booleans())
    def pin_changes(self, place: int, renew: bool) -> None:
        pins = self.core.commons._pins.listing()
        pin = pins[place % len(pins)]
        if renew:
            self.core.commons.renew(pin.namespace, pin.pin_id, 20.0)
        else:
            self.core.commons.unpin(pin.namespace, pin.pin_id)

    @rule(
        what=st.sampled_from(["damage", "damage", "flush", "step", "adapter", "restart", *TENANTS]),
        dice=st.integers(0, 60),
    )
    def calamity(self, what: str, dice: int) -> None:
        """Rare beside the rest, or there would be nothing left to lose."""
        if what in TENANTS:
            self.erase_tenant(what)
        elif what == "adapter":
            self.erase_adapter()
        elif what == "damage":
            self.store_is_damaged(dice // 2, cut=bool(dice % 2))
        elif what == "flush":
            self.store.flush()
        elif what == "step":
            self.step_fails()
        else:
            self.restart(bool(dice % 2), bool(dice // 2 % 2))

    def erase_tenant(self, tenant: str) -> None:
        name = self.name(tenant)
        assert self.below.fault_tier is not None
        self.gone[name] = not self.below.fault_tier.away and self.store.has_quotas
        self.generation[tenant] += 1
        self.core.erase_namespace(name)
        self.rules.nothing_of(lambda key: key.namespace == name)

    def erase_adapter(self) -> None:
        digest = self.adapter(True)
        self.generation["adapter"] += 1
        self.gone_adapters.add(adapter_bytes(digest))
        self.core.unload_adapter(digest or "")
        self.rules.nothing_of(lambda key: key.adapter == adapter_bytes(digest))

    def restart(self, promised: bool, pins_first: bool) -> None:
        """The engine dies with its memory, and its requests; the store lives. What was on its way to it is lost."""
        self.excused |= set(self.requests)
        self.core.close()
        self.endings |= {(name, index): FinishReason.CANCELLED for name in self.requests for index in range(3)}
        self.gone = dict.fromkeys(self.gone, False)
        self.boot(promised)
        alive = [record for record in self.records if record.order.namespace not in self.gone]
        if pins_first:
            self.core.commons.restore(alive)
        if promised and self.not_covered(self.policies) is None:
            self.core.commons.set_quotas(self.policies)
        if not pins_first:
            self.core.commons.restore(alive)

    # --- what must hold -----------------------------------------------------------------------------------

    @invariant()
    def everything_agrees(self) -> None:
        if hasattr(self, "rules"):
            self.rules.everything()
            self.kept = self.rules.pins(self.kept)

    @invariant()
    def what_is_erased_is_gone(self) -> None:
        """As soon as nothing can bring it back: for good."""
        if not hasattr(self, "rules") or self.core.commons.erasure.is_pending:
            return
        self.rules.nothing_of(lambda key: key.namespace in self.gone or key.adapter in self.gone_adapters)
        if not self.below.steps.waiting:
            told = {name for name, heard in self.gone.items() if heard}
            assert not told & {namespace for namespace, _ in self.store.contents().values()}

    def teardown(self) -> None:
        try:
            if hasattr(self, "core"):
                self.ends_well()
                self.core.close()
        finally:
            if hasattr(self, "patch"):
                self.patch.undo()

    def ends_well(self) -> None:
        self.below.set_mood("sound")
        for _ in range(400):
            if not self.core.has_work():
                break
            self.below.all_ends()
            self.step(1)
        assert not self.core.has_work(), "the engine makes no progress"
        for _ in range(4):
            self.below.all_ends()
            self.core.idle()
        self.everything_agrees()
        self.what_is_erased_is_gone()
        assert not self.core.commons.erasure.is_pending
        assert self.core.stats().blocks_active == 0
        ledger = self.below.kv.ledger
        assert ledger is not None
        assert all(account.pending == account.ahead == 0 for account in ledger.accounts.values())
        self.below.drain()
        self.everything_agrees()
        self.what_is_erased_is_gone()
        for name, item in self.requests.items():
            self.said_what_it_should(name, item)

    def said_what_it_should(self, name: str, item: GenerationRequest) -> None:
        root, params = self.core._root(item.adapter, item.namespace), item.sampling
        for index in range(params.n):
            said = self.tokens.get((name, index), [])
            assert said == continuation(root, item.prompt_token_ids, params.max_tokens, index)[: len(said)]
            if name not in self.excused:
                assert self.endings[name, index] is FinishReason.LENGTH
                assert len(said) == params.max_tokens


class MovingMachine(WholeMachine):
    """The same rules to keep, and fewer things that happen: so that blocks go up and down all the time."""

    def set_quotas(self, data: st.DataObject) -> None:
        """Not in this one."""

    def pin(self, tenant: str, seed: int, length: int, adapter: bool, floor: Floor) -> None:
        """Not in this one."""

    def pin_changes(self, place: int, renew: bool) -> None:
        """Not in this one."""

    def time_passes(self, seconds: float) -> None:
        """Only when all ends."""

    def store_mood(self, mood: str) -> None:
        """It is sound, but for what is damaged."""
