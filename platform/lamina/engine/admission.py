"""Whether a waiting choice may start, what it may still take, and who gives blocks back: the ledger, for choices.

A choice starts when its worst case fits its namespace's limit and the pool keeps its decode reserve. It then holds a
charge for all that it may come to use, so that what was admitted can end; preemption is for policy that changed
since, and for a namespace that wants its reservation back.

Until policy is loaded no rule applies: `decide` says nothing, and the scheduler does as it does without quotas.
"""

from __future__ import annotations

from collections.abc import Sequence

from lamina.engine.request import Choice
from lamina.errors import ExceedsQuota
from lamina_kvtier.admission import Cause, Decision, Verdict
from lamina_kvtier.blocks import CopyOnWrite
from lamina_kvtier.errors import IntegrityError, OutOfBlocks
from lamina_kvtier.ledger import Charge, Ledger
from lamina_kvtier.manager import KvManager

__all__ = ["Admission"]


class Admission:
    """The charges of running choices over one manager. Every charge is of a running choice."""

    def __init__(self, kv: KvManager) -> None:
        self._kv = kv
        self._charges: dict[Choice, Charge] = {}

    # --- decisions ----------------------------------------------------------------------------------------

    def decide(self, choice: Choice) -> Decision | None:
        """Whether a waiting choice may start, with the siblings that will fork off it. None: no rule applies."""
        ledger = self._rules
        if ledger is None:
            return None
        prefix = self._kv.preview(choice.known_ids(self._kv.block_size))
        worst, shared = self._worst_case(choice), prefix.known - prefix.cached
        return ledger.admit(owner_of(choice), worst, shared=shared, pinned=prefix.pinned)

    def is_entitled(self, choice: Choice, decision: Decision) -> bool:
        """Whether it stays within its namespace's reservation, which nobody may keep from it."""
        ledger = self._rules
        if ledger is None:
            return False
        account = ledger.account(owner_of(choice))
        return account.firm + account.pending + decision.need <= account.quota.reserved

    def require_possible(self, choice: Choice) -> None:
        """Raises ExceedsQuota for what could never start under the policy of now."""
        decision = self.decide(choice)
        if decision is not None and decision.verdict is Verdict.NEVER:
            raise impossible(decision)

    def victim(self, running: Sequence[Choice], choice: Choice, need: int) -> Choice | None:
        """Who gives blocks back so that a running choice gets `need` more. None: no rule applies.

        Beyond its own limit only its own namespace can help. Else the namespace furthest over its share does, of those
        that use more than their reservation: what others have within theirs would not come free for this one. Of a
        namespace's choices the youngest goes.
        """
        ledger = self._rules
        if ledger is None:
            return None
        mine = owner_of(choice)
        source = mine
        if ledger.room_in_limit(mine) >= need:
            accounts = [ledger.account(name) for name in {owner_of(other) for other in running}]
            over = [account for account in accounts if account.firm > account.quota.reserved]
            if over:
                source = min(over, key=lambda account: (-account.over_share, account.namespace)).namespace
        return youngest(running, source)

    # --- charges ------------------------------------------------------------------------------------------

    def start(self, choice: Choice) -> Charge | None:
        """Promises what an admitted choice may come to use. Before it acquires its prefix, out of this charge."""
        decision = self.decide(choice)
        if self._kv.ledger is None or decision is None:
            return None
        try:
            charge = self._kv.ledger.reserve(owner_of(choice), decision.need)
        except OutOfBlocks:
            return None  # it was let in without a promise, so it takes what it can get
        self._charges[choice] = charge
        return charge

    def allocate(self, choice: Choice, count: int) -> list[int]:
        """Blocks for a running choice, out of its charge as far as that goes. Raises OutOfBlocks."""
        charge = self._charges.get(choice)
        if charge is not None and charge.pending < count:
            charge = None
        return self._kv.allocate(count, owner=owner_of(choice), charge=charge)

    def make_writable(self, choice: Choice, block: int) -> CopyOnWrite | None:
        """See KvManager. A copy is one of the blocks that were promised."""
        copy = self._kv.make_writable(block, owner=owner_of(choice))
        charge = self._charges.get(choice)
        if copy is not None and charge is not None and charge.pending and self._kv.ledger is not None:
            self._kv.ledger.refund(charge, 1)
        return copy

    def fork(self, parent: Choice, child: Choice) -> None:
        """The child takes its part of the parent's charge along."""
        charge, ledger = self._charges.get(parent), self._kv.ledger
        if charge is None or ledger is None:
            return
        part = min(self._own_part(child), charge.pending)
        ledger.refund(charge, part)
        try:
            self._charges[child] = ledger.reserve(owner_of(child), part)
        except OutOfBlocks:
            return  # its limit was lowered since; it goes on without a promise

    def leave(self, choice: Choice) -> None:
        """It runs no more: what it did not take is nobody's again."""
        charge = self._charges.pop(choice, None)
        if charge is not None and self._kv.ledger is not None:
            self._kv.ledger.refund(charge)

    def check_integrity(self, running: Sequence[Choice]) -> None:
        """Raises IntegrityError for a charge of a choice that does not run."""
        stray = self._charges.keys() - set(running)
        if stray:
            raise IntegrityError([f"admission: {len(stray)} charges of choices that do not run"])

    # --- how ----------------------------------------------------------------------------------------------

    @property
    def _rules(self) -> Ledger | None:
        ledger = self._kv.ledger
        return ledger if ledger is not None and ledger.book.loaded else None

    def _worst_case(self, choice: Choice) -> int:
        """Blocks of all tokens that will be computed: siblings share the prompt's full blocks."""
        return self._shared_part(choice) + (1 + choice.unborn) * self._own_part(choice)

    def _shared_part(self, choice: Choice) -> int:
        return choice.prompt_len // self._kv.block_size

    def _own_part(self, choice: Choice) -> int:
        computed = choice.limit - 1  # the last token that may be drawn is not computed
        return -(-computed // self._kv.block_size) - self._shared_part(choice)


def owner_of(choice: Choice) -> str:
    """Who pays for its blocks."""
    return choice.request.request.namespace


def youngest(running: Sequence[Choice], namespace: str) -> Choice | None:
    """The namespace's youngest choice; None if it has none."""
    mine = [choice for choice in running if owner_of(choice) == namespace]
    return max(mine, key=lambda choice: choice.order, default=None)


def impossible(decision: Decision) -> ExceedsQuota:
    """What to say about a choice that can never start."""
    bound = "the most that your quota and what is reserved for others ever leave"
    assert decision.cause is Cause.CEILING
    return ExceedsQuota(
        f"The request may need {decision.need} KV blocks, but {decision.limit} is {bound}. "
        "Shorten the prompt or lower max_tokens or n.",
        limit=decision.limit,
        need=decision.need,
        have=decision.have,
        decision=decision.decision_id,
    )
