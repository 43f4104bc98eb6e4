"""Which tokens of which choices run in the next step. Decisions only: no tensors, no clocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from lamina.engine.admission import Admission, impossible, owner_of, youngest
from lamina.engine.plan import Chunk, StepPlan
from lamina.engine.queue import FairQueue
from lamina.engine.request import BlockTable, Choice, ChoiceStatus
from lamina.engine.tiers import NoTiers, TierGate
from lamina.errors import LaminaError
from lamina.types import EngineFailure
from lamina_kvtier.admission import Cause, Decision, Verdict
from lamina_kvtier.blocks import CopyOnWrite
from lamina_kvtier.errors import OutOfBlocks
from lamina_kvtier.identity import BlockId
from lamina_kvtier.manager import KvManager
from lamina_lora.errors import OutOfAdapterMemory

__all__ = ["AdapterGate", "Scheduler"]


class AdapterGate(Protocol):
    """Brings adapters into slots without blocking a step."""

    def try_acquire(self, digest: str) -> int | None:
        """The slot, with one reference taken; None while it loads.

        Raises OutOfAdapterMemory while adapters in use hold all memory, LaminaError if it can never be had.
        """
        ...

    def release(self, digest: str) -> None: ...


class Scheduler:
    """Decode first, then prefill chunks, then admissions, all within one token budget.

    The running list is ordered by age. When blocks run out, the youngest choice of the tenant that holds most
    blocks per weight gives its blocks back and queues again (preemption by recompute). Once quotas are loaded
    `Admission` says who may start and who gives back. `prefix_hit(namespace, identities)` hears of each prefix that a
    choice found when it first started.
    """

    def __init__(
        self,
        kv: KvManager,
        adapters: AdapterGate,
        tiers: TierGate | None = None,
        *,
        max_batch_tokens: int,
        max_running: int,
    ) -> None:
        self.kv = kv
        self.queue = FairQueue()
        self.running: list[Choice] = []
        self.preemptions = 0
        self.prefix_hit_tokens = 0
        self._adapters = adapters
        self._tiers: TierGate = NoTiers() if tiers is None else tiers
        self._slots: dict[Choice, int] = {}
        self._crowded = False  # a choice waits for room in the pool, in the admission under way
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._block_size = kv.block_size
        self.admission = Admission(kv)
        self.prefix_hit: Callable[[str, Sequence[BlockId]], object] = _nobody_asks

    # --- plan ---------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        plan = StepPlan()
        budget = self._max_batch_tokens
        ready = [choice for choice in self.running if not choice.is_drawn_out]
        decoding = [choice for choice in ready if choice.pending == 1]
        prefilling = [choice for choice in ready if choice.pending > 1]
        for choice in decoding + prefilling:
            budget -= self._schedule(choice, budget, plan)
        if not plan.preempted:
            self._admit(plan, budget)
        for chunk in plan.chunks:
            self.queue.charge(chunk.choice.request.tenant, chunk.count, chunk.choice.request.request.weight)
        return plan

    def _schedule(self, choice: Choice, budget: int, plan: StepPlan) -> int:
        """Adds a chunk of at most `budget` tokens; returns the tokens used, less those that preemption freed."""
        freed = 0
        count = min(choice.pending, budget)
        while choice.status is ChoiceStatus.RUNNING and count > 0:
            try:
                copy, fresh = self._make_room(choice, count)
            except OutOfBlocks as shortage:
                if self._tiers.give_back():
                    continue
                victim = self.admission.victim(self.running, choice, shortage.need) or self._victim()
                freed += self._preempt(victim, plan)
                continue
            plan.chunks.append(Chunk(choice, choice.computed, count, self._slots.get(choice), copy, fresh))
            return count - freed
        return -freed

    def _make_room(self, choice: Choice, count: int) -> tuple[CopyOnWrite | None, list[int]]:
        """Makes the table cover and own the next `count` tokens; returns what to copy and the new blocks.

        All or nothing; raises OutOfBlocks.
        """
        copies = self._shared_tail(choice)
        missing = self._blocks_for(choice.computed + count) - len(choice.table)
        available = self.kv.available_to(owner_of(choice))
        if missing + copies > available:
            raise OutOfBlocks(missing + copies, available)
        copy = None
        if copies:
            tail = choice.computed // self._block_size
            copy = self.admission.make_writable(choice, choice.table[tail])
            if copy is not None:
                choice.table.replace(tail, copy.target)
        fresh = self.admission.allocate(choice, max(missing, 0))
        choice.table += fresh
        return copy, fresh

    def _shared_tail(self, choice: Choice) -> int:
        """1 if the next token falls into a block that other choices read too, so that it must be copied."""
        tail, offset = divmod(choice.computed, self._block_size)
        return int(offset > 0 and self.kv.is_shared(choice.table[tail]))

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    # --- admission ----------------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """One choice of each tenant in turn, the least served tenant first, until something runs out."""
        heads = deque(self.queue.heads())
        adapters_full = False
        self._crowded = False
        while heads and budget > 0:
            choice = heads.popleft()
            if not self._has_seats(choice):
                return
            decision = self.admission.decide(choice)
            if decision is None and not self._has_blocks(choice):
                return
            if decision is not None and not self._may_start(choice, decision, plan):
                if plan.preempted:
                    return
                continue  # what this tenant lacks, the others may have
            if not self._tiers.is_ready(choice):
                continue  # its blocks are on their way up; the others need not wait
            if adapters_full and choice.request.request.adapter is not None:
                continue  # lets adapter memory drain for the head before it, which would starve otherwise
            try:
                slot = self._adapter_slot(choice)
            except OutOfAdapterMemory:
                adapters_full = True
                continue
            except LaminaError as error:
                self.queue.remove(choice)
                plan.failures.append((choice, EngineFailure(error.code, error.message, error.param)))
            else:
                if slot is _LOADING:
                    continue  # other tenants need not wait for this one's adapter
                self._start(choice, slot)
                budget -= self._schedule(choice, budget, plan)
            if plan.preempted:
                return
            following = self.queue.head(choice.request.tenant)
            if following is not None:
                heads.append(following)

    def _has_seats(self, choice: Choice) -> bool:
        seats = sum(1 + other.unborn for other in self.running)
        return not self.running or seats + 1 + choice.unborn <= self._max_running

    def _has_blocks(self, choice: Choice) -> bool:
        """Room for the whole of what is to be computed, with one block in reserve for each running choice."""
        prefix = self.kv.preview(choice.known_ids(self._block_size))
        missing = self._blocks_for(len(choice.tokens)) - prefix.known
        reserve = len(self.running) + choice.unborn
        return missing + prefix.cached + reserve <= self.kv.available or not self.running

    def _may_start(self, choice: Choice, decision: Decision, plan: StepPlan) -> bool:
        """Applies the ledger's decision. Behind a choice that the pool has no room for only those within their
        reservation start, so that it is not overtaken for ever; it takes back what belongs to its reservation."""
        if decision.admitted:
            return not self._crowded or self.admission.is_entitled(choice, decision)
        if decision.verdict is Verdict.NEVER:
            self.queue.remove(choice)
            error = impossible(decision)
            plan.failures.append((choice, EngineFailure(error.code, error.message, error.param)))
            return False
        self._crowded = self._crowded or decision.cause is Cause.POOL
        victim = None if decision.preempt is None else youngest(self.running, decision.preempt)
        if victim is not None:
            self._preempt(victim, plan)
        elif not self.running:
            self._tiers.give_back()  # what was fetched for choices that all wait for each other
        return False

    def _adapter_slot(self, choice: Choice) -> int | None:
        digest = choice.request.request.adapter
        if digest is None:
            return None
        slot = self._adapters.try_acquire(digest)
        return _LOADING if slot is None else slot

    def _start(self, choice: Choice, slot: int | None) -> None:
        self.queue.remove(choice)
        charge = self.admission.start(choice)
        choice.table = BlockTable(self.kv.acquire(choice.known_ids(self._block_size), charge))
        self._tiers.started(choice)
        choice.published = len(choice.table)
        choice.computed = len(choice.table) * self._block_size
        choice.status = ChoiceStatus.RUNNING
        if choice.request.cached_tokens is None:
            choice.request.cached_tokens = choice.computed
            self.prefix_hit_tokens += choice.computed
            self.prefix_hit(owner_of(choice), choice.chain.ids[: len(choice.table)])
        if slot is not None:
            self._slots[choice] = slot
        self._seat(choice)

    def _seat(self, choice: Choice) -> None:
        at = len(self.running)
        while at > 0 and self.running[at - 1].order > choice.order:
            at -= 1
        self.running.insert(at, choice)

    # --- leaving ------------------------------------------------------------------------------------------

    def _victim(self) -> Choice:
        held: dict[str, float] = {}
        for choice in self.running:
            share = len(choice.table) / choice.request.request.weight
            held[choice.request.tenant] = held.get(choice.request.tenant, 0.0) + share
        return max(self.running, key=lambda choice: (held[choice.request.tenant], choice.order))

    def _preempt(self, choice: Choice, plan: StepPlan) -> int:
        self._leave(choice)
        choice.status = ChoiceStatus.WAITING
        self.queue.push(choice)
        self.preemptions += 1
        plan.preempted.append(choice)
        return plan.drop(choice)

    def finish(self, choice: Choice) -> None:
        """Ends a choice in any state and gives back its blocks and its adapter reference."""
        self._tiers.left(choice)
        if choice.status is ChoiceStatus.RUNNING:
            self._leave(choice)
        elif choice.status is ChoiceStatus.WAITING and choice in self.queue:
            self.queue.remove(choice)
        choice.status = ChoiceStatus.FINISHED

    def _leave(self, choice: Choice) -> None:
        self.running.remove(choice)
        self.admission.leave(choice)
        self.kv.release(choice.table)
        choice.table = BlockTable()
        choice.computed = choice.published = 0
        if self._slots.pop(choice, None) is not None:
            self._adapters.release(choice.request.request.adapter or "")

    # --- after the step -----------------------------------------------------------------------------------

    def computed(self, chunk: Chunk) -> None:
        """Books a chunk whose keys and values are written by all that runs after it, and publishes what it filled."""
        chunk.choice.computed = chunk.stop
        self.publish(chunk.choice)

    def publish(self, choice: Choice) -> None:
        """Makes full blocks findable, as far as their tokens are known."""
        full = min(choice.computed // self._block_size, len(choice.chain.ids))
        for block in range(choice.published, full):
            self.kv.publish(choice.table[block], choice.chain.ids[block])
        choice.published = max(choice.published, full)

    def fork(self, parent: Choice, child: Choice) -> None:
        """Seats `child` beside `parent`, sharing all its blocks until one of them writes."""
        self.kv.fork(parent.table)
        self.admission.fork(parent, child)
        child.table = BlockTable(parent.table)
        child.computed, child.published = parent.computed, parent.published
        child.status = ChoiceStatus.RUNNING
        slot = self._slots.get(parent)
        if slot is not None:
            again = self._adapters.try_acquire(parent.request.request.adapter or "")
            if again != slot:
                raise AssertionError(f"adapter slot moved from {slot} to {again} while in use")
            self._slots[child] = slot
        self._seat(child)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless blocks, tables, reference counts and charges agree."""
        self.admission.check_integrity(self.running)
        self.kv.check_integrity([*(choice.table for choice in self.running), *self._tiers.held_tables()])


def _nobody_asks(_namespace: str, _prefix: Sequence[BlockId]) -> None:
    """Stands for a listener."""


_LOADING = -1
