"""Whether a waiting choice may start, what it may still take, and who gives blocks back: the ledger, for choices.

A choice starts when the tokens that it has today fit, with room left for the others' next tokens. It is *assured* if
even its worst case (all of max_tokens) stays within its namespace's reservation: then it takes back what is its own,
and gives nothing to others. All other choices use what is there for as long as nobody with a reservation wants it: the
youngest of the namespace furthest over its share gives its blocks back, and resumes later. docs/kv.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lamina.engine.request import Choice
from lamina.errors import ExceedsQuota
from lamina_kvtier.admission import Cause, Decision, Verdict
from lamina_kvtier.blocks import CopyOnWrite
from lamina_kvtier.errors import IntegrityError
from lamina_kvtier.ledger import Charge
from lamina_kvtier.manager import KvManager

__all__ = ["Admission"]


class Admission:
    """The charges of running choices over one manager with quotas. Each running choice has one, and no other."""

    def __init__(self, kv: KvManager) -> None:
        """Raises ValueError without quotas; those that nobody set bind nobody."""
        if kv.ledger is None:
            raise ValueError("admission needs a KvManager with quotas")
        self._kv, self._ledger = kv, kv.ledger
        self._charges: dict[Choice, Charge] = {}

    # --- decisions ----------------------------------------------------------------------------------------

    def decide(self, choice: Choice, *, leave: int = 0, claimed: int = 0, may_wait: bool = True) -> Decision:
        """Whether a waiting choice may start, with the siblings that will fork off it.

        Blocks that stay for others: `leave` for the next tokens of running choices, `claimed` by those that start soon.
        """
        prefix = self._kv.preview(choice.known_ids(self._kv.block_size))
        worst = self._worst_case(choice)
        now = min(worst, self._blocks_for(len(choice.tokens)))
        return self._ledger.admit(
            owner_of(choice),
            worst,
            now=now,
            shared=min(prefix.known - prefix.cached, now),
            pinned=min(prefix.pinned, now),
            leave=leave,
            claimed=claimed,
            may_wait=may_wait,
        )

    def may_be_entitled(self, choice: Choice) -> bool:
        """False if no reservation can help it. O(1), unlike a decision."""
        account = self._ledger.account(owner_of(choice))
        return account.spoken_for < account.quota.reserved

    def require_possible(self, choice: Choice) -> None:
        """Raises ExceedsQuota for what could never start under the policy of now."""
        decision = self.decide(choice)
        if decision.verdict is Verdict.NEVER:
            raise impossible(decision)

    def is_assured(self, choice: Choice) -> bool:
        """Whether a running choice started within its reservation, so that it gives nothing to others."""
        return self._charges[choice].assured

    def victim(self, running: Sequence[Choice], choice: Choice, need: int) -> Choice | None:
        """Who gives blocks back so that a running choice gets `need` more; None: nobody has to, they are on their way.

        Beyond its own limit only its own namespace can help. Else the namespace furthest over its share does, of those
        that use more than their reservation: what others have within theirs would not come free for this one.
        """
        mine = owner_of(choice)
        if self._ledger.room_in_limit(mine) < need:
            return _youngest(running, mine, self._charges)
        furthest = self._furthest_over(running, growing=mine, by=need)
        if furthest is None and self.is_assured(choice):
            return None  # only blocks that are held for transfers are in its way
        return _youngest(running, furthest or mine, self._charges)

    def gives_way(self, running: Sequence[Choice], entitled: Choice) -> Choice | None:
        """Who makes room for a waiting choice within its reservation; None: nobody who has to."""
        mine = owner_of(entitled)
        others = [choice for choice in running if owner_of(choice) != mine and not self.is_assured(choice)]
        furthest = self._furthest_over(others)
        return None if furthest is None else _youngest(others, furthest, self._charges)

    def _furthest_over(self, running: Iterable[Choice], *, growing: str = "", by: int = 0) -> str | None:
        """Of the namespaces of these choices, the one furthest over its share by what it uses, in blocks per weight."""
        weights = {owner_of(choice): choice.request.request.weight for choice in running}
        found: list[tuple[float, str]] = []
        for name, weight in weights.items():
            account = self._ledger.account(name)
            excess = account.firm + (by if name == growing else 0) - account.quota.reserved
            if excess > 0:
                found.append((-excess / (account.quota.weight if self._ledger.book.loaded else weight), name))
        return min(found)[1] if found else None

    # --- charges ------------------------------------------------------------------------------------------

    def start(self, choice: Choice) -> Charge:
        """Promises what an admitted choice needs. Before it acquires its prefix, out of this charge."""
        decision = self.decide(choice)
        charge = self._ledger.reserve(
            owner_of(choice),
            decision.need if decision.admitted else 0,
            ahead=decision.ahead if decision.entitled else 0,
            assured=decision.entitled,
        )
        self._charges[choice] = charge
        return charge

    def allocate(self, choice: Choice, count: int) -> list[int]:
        """Blocks for a running choice, out of its charge. Raises OutOfBlocks."""
        charge, owner = self._charges[choice], owner_of(choice)
        missing = count - charge.pending
        if missing > 0:
            if count > self._kv.available_to(owner):
                return self._kv.allocate(count, owner=owner)  # which refuses
            self._ledger.extend(charge, missing)
        return self._kv.allocate(count, owner=owner, charge=charge)

    def spare(self, choice: Choice, count: int) -> None:
        """A running choice needs so many blocks of its charge no more: others have computed them."""
        charge = self._charges[choice]
        self._ledger.refund(charge, min(max(count, 0), charge.pending))

    def give_back(self, choice: Choice, count: int) -> None:
        """So many blocks that a running choice allocated were released unused: it may want others in their place."""
        self._ledger.expect(self._charges[choice], count)

    def make_writable(self, choice: Choice, block: int) -> CopyOnWrite | None:
        """See KvManager. A copy is one of the blocks that were promised."""
        copy = self._kv.make_writable(block, owner=owner_of(choice))
        charge = self._charges[choice]
        if copy is not None:
            if not charge.pending and charge.ahead:
                self._ledger.extend(charge, 1)
            self._ledger.refund(charge, min(1, charge.pending))
        return copy

    def fork(self, parent: Choice, child: Choice) -> None:
        """The child takes its part of the parent's charge along."""
        self._charges[child] = self._ledger.split(self._charges[parent], 0, self._own_part(child))

    def leave(self, choice: Choice) -> None:
        """It runs no more: what it did not take is nobody's again."""
        self._ledger.refund(self._charges.pop(choice))

    def check_integrity(self, running: Sequence[Choice]) -> None:
        """Raises IntegrityError unless exactly the running choices have charges."""
        if self._charges.keys() != set(running):
            raise IntegrityError([f"admission: {len(self._charges)} charges for {len(running)} running choices"])

    # --- how ----------------------------------------------------------------------------------------------

    def _worst_case(self, choice: Choice) -> int:
        """Blocks of all tokens that will be computed: siblings share the prompt's full blocks."""
        return self._shared_part(choice) + (1 + choice.unborn) * self._own_part(choice)

    def _shared_part(self, choice: Choice) -> int:
        return choice.prompt_len // self._kv.block_size

    def _own_part(self, choice: Choice) -> int:
        computed = choice.limit - 1  # the last token that may be drawn is not computed
        return self._blocks_for(computed) - self._shared_part(choice)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._kv.block_size)


def owner_of(choice: Choice) -> str:
    """Who pays for its blocks."""
    return choice.request.request.namespace


def _youngest(running: Sequence[Choice], namespace: str, charges: dict[Choice, Charge]) -> Choice:
    """The namespace's youngest choice that is not assured. If all are, policy or its own pins changed since they
    started, and the youngest of them gives way."""
    mine = [choice for choice in running if owner_of(choice) == namespace]
    return max(mine, key=lambda choice: (not charges[choice].assured, choice.order))


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
