"""Which tokens of which choices run in the next step. Decisions only: no tensors, no clocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from lamina.engine.admission import Admission, impossible, owner_of
from lamina.engine.failures import failure_of
from lamina.engine.load_cost import LoadCost
from lamina.engine.plan import Chunk, StepPlan
from lamina.engine.queue import FairQueue
from lamina.engine.request import BlockTable, Choice, ChoiceStatus
from lamina.engine.tier_protocol import NoTiers, TierGate
from lamina.errors import LaminaError
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

    def load_seconds(self, digest: str) -> float:
        """How long it took to load, for the first who asks; 0 for all that find it loaded."""
        ...


class Scheduler:
    """Decode first and in full, then prompts within what one step may spend on them, the least served tenant first.

    The running list is ordered by age. `Admission` says who may start, and who gives blocks back when they run out;
    that choice queues again, and computes again what nobody kept. `prefix_found(choice)` hears of each choice that
    starts for the first time; its table has the blocks that were found.
    """

    def __init__(
        self,
        kv: KvManager,
        adapters: AdapterGate,
        tiers: TierGate | None = None,
        *,
        max_batch_tokens: int,
        max_running: int,
        max_prefill_tokens: int | None = None,
    ) -> None:
        """`max_prefill_tokens`: of prompts in one step, so that decoding is held up for no longer; None: as it fits.

        Raises ValueError if `kv` has no quotas.
        """
        self.kv = kv
        self.queue = FairQueue(credit=max_batch_tokens)
        self.running: list[Choice] = []
        self.preemptions = 0
        self.prefix_hit_tokens = 0
        self._adapters = adapters
        self._tiers: TierGate = NoTiers() if tiers is None else tiers
        self._slots: dict[Choice, int] = {}
        self._crowded = False  # a choice waits for room or a seat, in the plan under way
        self._claimed = 0  # blocks for choices that start once what they wait for has arrived, in the plan under way
        self._adapters_full = False  # in the plan under way
        self._turn = 0  # decoding choices that had their turn, if a step is too small for all
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._max_prefill_tokens = max_batch_tokens if max_prefill_tokens is None else max_prefill_tokens
        self._block_size = kv.block_size
        self.load_cost = LoadCost(_DEAREST_LOAD * max_batch_tokens)
        self.admission = Admission(kv)
        self.prefix_found: Callable[[Choice], object] = _nobody_asks
        self.prefix_taken: Callable[[Choice, Sequence[BlockId]], object] = _nobody_asks
        self._filling: set[BlockId] = set()  # blocks that the plan under way computes, at least in part

    # --- plan ---------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        plan = StepPlan()
        self._filling.clear()
        ready = [choice for choice in self.running if not choice.is_drawn_out]
        self._decode([choice for choice in ready if choice.pending == 1], plan)
        self._prefill([choice for choice in ready if choice.pending > 1], plan)
        for chunk in plan.chunks:
            self.queue.charge(chunk.choice.request.tenant, chunk.count, chunk.choice.request.request.weight)
        return plan

    def look_ahead(self) -> None:
        """Blocks of those that wait begin to come up, before their turn."""
        self._tiers.look_ahead(self.queue.soon(_LOOK_AHEAD))

    def _decode(self, decoding: list[Choice], plan: StepPlan) -> None:
        """One token of each; in turn, if they are more than a step has tokens."""
        if len(decoding) > self._max_batch_tokens:
            first = self._turn % len(decoding)
            decoding = [*decoding[first:], *decoding[:first]][: self._max_batch_tokens]
            self._turn = first + self._max_batch_tokens
        for choice in decoding:
            if choice.status is ChoiceStatus.RUNNING:  # still: it may have given way to one before it
                self._schedule(choice, 1, plan)

    def _prefill(self, started: list[Choice], plan: StepPlan) -> None:
        """Goes on with prompts and starts waiting choices: of the least served tenant first, of one tenant by age."""
        self._crowded, self._claimed, self._adapters_full = bool(plan.preempted), 0, False
        heads = deque(self.queue.heads(self.admission.may_be_entitled))
        under_way = deque(sorted(started, key=lambda choice: (self.queue.served(choice.request.tenant), choice.order)))
        left = self._prefill_left(plan)
        while left > 0 and (under_way or heads):
            if under_way and (not heads or self._goes_first(under_way[0], heads[0])):
                choice = under_way.popleft()
                if choice.status is ChoiceStatus.RUNNING:
                    self._schedule(choice, min(left, self._coverable(choice, plan)), plan)
            else:
                choice = heads.popleft()
                if not self._admit(choice, plan):
                    continue
                self._schedule(choice, left, plan)
                following = self.queue.head(choice.request.tenant)
                if following is not None:
                    heads.append(following)
            left = self._prefill_left(plan)

    def _goes_first(self, started: Choice, waiting: Choice) -> bool:
        """Of equals the one that goes on, unless the other may have a reservation to claim."""
        mine, other = self.queue.served(started.request.tenant), self.queue.served(waiting.request.tenant)
        return mine < other or (mine == other and not self.admission.may_be_entitled(waiting))

    def _prefill_left(self, plan: StepPlan) -> int:
        prompts = sum(chunk.count for chunk in plan.chunks if not chunk.decodes)
        return min(self._max_prefill_tokens - prompts, self._max_batch_tokens - plan.tokens)

    def _coverable(self, choice: Choice, plan: StepPlan) -> int:
        """Tokens of its prompt for which there are blocks, without those that decoding needs in the next step.

        An assured choice, and one beside which nothing decodes, takes what it needs instead.
        """
        next_blocks = sum(chunk.decodes and chunk.stop % self._block_size == 0 for chunk in plan.chunks)
        if not next_blocks or self.admission.is_assured(choice):
            return choice.pending
        blocks = len(choice.table) + max(0, self.kv.available_to(owner_of(choice)) - next_blocks)
        return blocks * self._block_size - choice.computed

    def _schedule(self, choice: Choice, budget: int, plan: StepPlan) -> int:
        """Adds a chunk of at most `budget` tokens; returns the tokens used, less those that preemption freed."""
        freed = 0
        count = min(choice.pending, budget)
        if choice.status is ChoiceStatus.RUNNING and choice.pending > 1 and count > 0:
            self._take_published(choice)
            count = min(choice.pending, budget, self._worth_computing(choice))
        while choice.status is ChoiceStatus.RUNNING and count > 0:
            try:
                copy, fresh = self._make_room(choice, count)
            except OutOfBlocks as shortage:
                if self._tiers.give_back():
                    continue
                victim = self.admission.victim(self.running, choice, shortage.need)
                if victim is None:
                    break  # it goes on when the blocks have come
                freed += self._preempt(victim, plan)
                continue
            chunk = Chunk(choice, choice.computed, count, self._slots.get(choice), copy, fresh)
            plan.chunks.append(chunk)
            self._filling.update(self._identities(choice, chunk.start, chunk.stop))
            return count - freed
        return -freed

    def _take_published(self, choice: Choice) -> None:
        """Goes on behind blocks that others have published since: a fetch of its own, or a choice with the same prefix.

        They take the place of those that it would have computed; of a block that it has begun, too.
        """
        at, begun = divmod(choice.computed, self._block_size)
        known = choice.known_ids(self._block_size)
        if at >= len(known) or not self.kv.holds(known[at]):
            return
        blocks = self.kv.acquire(known[at:])
        ids = known[at : at + len(blocks)]
        if begun:
            self.kv.release([choice.table.drop_last()])
        prepaid = self._tiers.took(choice, ids)
        self.admission.spare(choice, len(blocks) - prepaid - bool(begun))
        choice.table += blocks
        choice.published = len(choice.table)
        choice.computed = choice.published * self._block_size
        if choice.output_len == 0:
            self.prefix_hit_tokens += len(blocks) * self._block_size - begun
        self.prefix_taken(choice, ids)

    def _worth_computing(self, choice: Choice) -> int:
        """Tokens of its prompt that nobody else is about to have: blocks that come up in time, or that a choice with
        the same prefix computes in this very step."""
        if self.kv.prefix_caching and not self._filling.isdisjoint(
            self._identities(choice, choice.computed, choice.computed + 1)
        ):
            return 0
        until = self._tiers.computes_until(choice)
        return choice.pending if until is None else until * self._block_size - choice.computed

    def _identities(self, choice: Choice, start: int, stop: int) -> list[BlockId]:
        """Of the blocks that these tokens of a prompt lie in, as far as a look-up could find them."""
        first, last = start // self._block_size, -(-stop // self._block_size)
        return choice.chain.ids[first : min(last, (len(choice.tokens) - 1) // self._block_size)]

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

    def _admit(self, choice: Choice, plan: StepPlan) -> bool:
        """Starts a waiting choice if nothing is in its way; what one tenant lacks, the others may have."""
        gone = len(plan.preempted)
        if choice in plan.preempted or not self._may_start(choice, plan):
            return False
        # What others have made way for starts now, or they would come back meanwhile and have to go again.
        if not self._tiers.is_ready(choice) and len(plan.preempted) == gone:
            self._claimed += self.admission.decide(choice).need  # the others need not wait, but leave it its room
            return False
        if self._adapters_full and choice.request.request.adapter is not None:
            return False  # lets adapter memory drain for the head before it, which would starve otherwise
        try:
            slot = self._adapter_slot(choice)
        except OutOfAdapterMemory:
            self._adapters_full = True
            return False
        except LaminaError as error:
            self._fail(choice, error, plan)
            return False
        if slot is _LOADING:
            return False
        self._start(choice, slot)
        return True

    def _fail(self, choice: Choice, error: LaminaError, plan: StepPlan) -> None:
        self.queue.remove(choice)
        plan.failures.append((choice, failure_of(error)))

    def _may_start(self, choice: Choice, plan: StepPlan) -> bool:
        """Applies the ledger's decision. Behind a choice that there is no room for, only those within their reservation
        start, so that it is not overtaken for ever; they take back what belongs to their reservation."""
        if self._crowded and not self.admission.may_be_entitled(choice):
            return False
        decision = self._decide(choice)
        if decision.verdict is Verdict.NEVER:
            self._fail(choice, impossible(decision), plan)
            return False
        has_seats = self._has_seats(choice)
        if decision.entitled:
            return (decision.admitted and has_seats) or self._make_way(choice, plan)
        if decision.admitted and has_seats:
            return not self._crowded
        self._crowded = self._crowded or not has_seats or decision.cause is Cause.POOL
        if not self.running:
            self._tiers.give_back()  # what was fetched for choices that all wait for each other
        return False

    def _decide(self, choice: Choice) -> Decision:
        leave = len(self.running) + choice.unborn if self.running else 0
        return self.admission.decide(choice, leave=leave, claimed=self._claimed)

    def _has_seats(self, choice: Choice) -> bool:
        seats = sum(1 + other.unborn for other in self.running)
        return not self.running or seats + 1 + choice.unborn <= self._max_running

    def _make_way(self, choice: Choice, plan: StepPlan) -> bool:
        """Preempts others, as many as it takes, for a choice that is within its reservation; in this very step."""
        if not self._has_adapter(choice):
            return False  # nobody is to make way for one that could not start all the same
        while not (self._decide(choice).admitted and self._has_seats(choice)):
            if self._tiers.give_back():
                continue
            victim = self.admission.gives_way(self.running, choice)
            if victim is None:
                return False
            self._preempt(victim, plan)
        return True

    def _has_adapter(self, choice: Choice) -> bool:
        """Whether it is there already; if not, it begins to load. Errors are for the start to meet."""
        try:
            slot = self._adapter_slot(choice)
        except OutOfAdapterMemory:
            return False
        except LaminaError:
            return True
        if slot is not None and slot is not _LOADING:
            self._adapters.release(choice.request.request.adapter or "")
        return slot is not _LOADING

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
        self._tiers.started(choice, partial(self.admission.allocate, choice), partial(self.admission.give_back, choice))
        choice.published = len(choice.table)
        choice.computed = len(choice.table) * self._block_size
        choice.status = ChoiceStatus.RUNNING
        if choice.request.cached_tokens is None:
            choice.request.cached_tokens = choice.computed
            self.prefix_hit_tokens += choice.computed
            self.prefix_found(choice)
        if slot is not None:
            self._slots[choice] = slot
            self._charge_load(choice)
        self._seat(choice)

    def _charge_load(self, choice: Choice) -> None:
        """Loads are part of what a tenant is served."""
        request = choice.request.request
        seconds = self._adapters.load_seconds(request.adapter or "")
        if seconds:
            self.queue.charge(request.tenant, self.load_cost.tokens(seconds), request.weight)

    def _seat(self, choice: Choice) -> None:
        at = len(self.running)
        while at > 0 and self.running[at - 1].order > choice.order:
            at -= 1
        self.running.insert(at, choice)

    # --- leaving ------------------------------------------------------------------------------------------

    def _preempt(self, choice: Choice, plan: StepPlan) -> int:
        self._tiers.gives_way(choice)
        self._tiers.left(choice)
        self._leave(choice)
        choice.status = ChoiceStatus.WAITING
        self.queue.push(choice)
        self.preemptions += 1
        self._filling.clear()  # who waits for what is not computed now would lose a step
        plan.preempted.append(choice)
        return plan.drop(choice)

    def refusal(self, choice: Choice) -> Decision | None:
        """Why a choice that never started, and may wait no longer, has to go; None if it does not wait."""
        if choice.status is not ChoiceStatus.WAITING or choice.output_len > 0 or choice not in self.queue:
            return None
        return self.admission.decide(choice, leave=len(self.running), may_wait=False)

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
            self.kv.publish(choice.table[block], choice.chain.ids[block], adapter=choice.request.adapter)
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


def _nobody_asks(*_: object) -> None:
    """Stands for a listener."""


_LOADING = -1
_LOOK_AHEAD = 2  # choices of each tenant whose blocks come up before their turn
_DEAREST_LOAD = 4  # full steps that one load may cost
