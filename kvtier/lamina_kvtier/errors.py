"""Everything that can go wrong with KV blocks.

    KvError
    ├── Refused           (limit, need, have, retry_after_s, decision_id)
    │   ├── OutOfBlocks                   more blocks wanted than are free or evictable
    │   │   └── OverLimit (namespace)     more than the namespace's own limit leaves
    │   ├── QuotaNotCoverable (namespace) a policy that promises more than there is
    │   └── PolicyNotLoaded               quotas are not known yet
    ├── InvalidQuota                      numbers that are no quota
    ├── LedgerMisuse                      a charge settled twice, more given back than was charged
    ├── UnknownPin        (pin_id)        no such pin in this namespace
    ├── BlockMisuse      (block)          a broken rule: double release, publish of a free block, bad number
    ├── InvalidIdentity                   a field or token id that cannot be part of a block's identity
    └── IntegrityError   (violations)     the bookkeeping contradicts itself: a bug here or in the tables

All but IntegrityError leave every state as it was.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence

__all__ = [
    "BlockMisuse",
    "IntegrityError",
    "InvalidIdentity",
    "InvalidQuota",
    "KvError",
    "LedgerMisuse",
    "OutOfBlocks",
    "OverLimit",
    "PolicyNotLoaded",
    "QuotaNotCoverable",
    "Refused",
    "UnknownPin",
    "new_decision_id",
]

_SHOWN_VIOLATIONS = 20

_process = secrets.token_hex(4)
_decisions = itertools.count(1)


def new_decision_id() -> str:
    """Unique over processes, cheap enough for refusals that are mere control flow, and in the order of time."""
    return f"kv-{_process}-{next(_decisions):x}"


class KvError(Exception):
    """Something is wrong with KV blocks."""


class Refused(KvError):
    """A wish that cannot be granted now, or not with this policy, in the unit of what was wished for.

    `need` was asked for, `have` could be given, `limit` is the bound that said no. `retry_after_s`: seconds until
    another try makes sense; None: no waiting helps, or nobody can tell. `decision_id` finds the decision in logs.
    """

    def __init__(
        self,
        message: str,
        *,
        limit: int,
        need: int,
        have: int,
        retry_after_s: float | None = None,
        decision_id: str | None = None,
    ) -> None:
        self.limit, self.need, self.have, self.retry_after_s = limit, need, have, retry_after_s
        self.decision_id = decision_id or new_decision_id()
        super().__init__(message)


class OutOfBlocks(Refused):
    """More blocks were asked for than are free or evictable. Nothing was allocated; preempt or wait."""

    def __init__(self, need: int, have: int, *, limit: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(
            f"{need} KV blocks are needed, but only {have} are free or evictable. "
            "Release or preempt a sequence, then try again.",
            limit=have if limit is None else limit,
            need=need,
            have=have,
            retry_after_s=retry_after_s,
        )


class OverLimit(OutOfBlocks):
    """A namespace asked for more than its limit leaves. Nothing was taken; only its own releases help."""

    def __init__(self, namespace: str, *, limit: int, need: int, have: int, retry_after_s: float | None) -> None:
        self.namespace = namespace
        Refused.__init__(
            self,
            f"Namespace {namespace!r} needs {need} more, but its limit of {limit} leaves {have}. "
            "End or preempt one of its own sequences, then try again.",
            limit=limit,
            need=need,
            have=have,
            retry_after_s=retry_after_s,
        )


class QuotaNotCoverable(Refused):
    """A policy would promise more than there is. It was not set, and nothing was rescaled.

    `need` is what this namespace (None: all together) wants reserved, `have` what the others leave of `limit`.
    """

    def __init__(self, namespace: str | None, *, limit: int, need: int, have: int) -> None:
        self.namespace = namespace
        who = "All namespaces together want" if namespace is None else f"Namespace {namespace!r} wants"
        super().__init__(
            f"{who} {need} reserved, but of the {limit} that can be promised only {have} are left. "
            "Lower a reservation first.",
            limit=limit,
            need=need,
            have=have,
        )


class PolicyNotLoaded(Refused):
    """Quotas are not known yet: load all of them at once, before any is changed."""

    def __init__(self) -> None:
        super().__init__(
            "Quotas are not loaded yet, so none can be changed. Load all of them first.",
            limit=0,
            need=0,
            have=0,
            retry_after_s=1.0,
        )


class InvalidQuota(KvError):
    """Numbers that are no quota: 0 <= pin_limit <= reserved <= limit and a positive, finite weight are."""


class LedgerMisuse(KvError):
    """The caller broke a rule of the ledger: a charge settled twice, more given back than was charged."""


class UnknownPin(KvError):
    """This namespace has no such pin: it never had, or it was deleted or has expired."""

    def __init__(self, pin_id: str) -> None:
        self.pin_id = pin_id
        super().__init__(f"There is no pin {pin_id!r}; it may have expired.")


class BlockMisuse(KvError):
    """The caller broke a rule of the block life cycle. `block` is the offending block, if there is one."""

    def __init__(self, message: str, *, block: int | None = None) -> None:
        self.block = block
        super().__init__(message)


class InvalidIdentity(KvError):
    """A field or token id cannot be part of a block's identity."""


class IntegrityError(KvError):
    """The bookkeeping contradicts itself. `violations` holds every broken rule, one sentence each."""

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        shown = "; ".join(self.violations[:_SHOWN_VIOLATIONS])
        hidden = len(self.violations) - _SHOWN_VIOLATIONS
        more = f"; and {hidden} more" if hidden > 0 else ""
        super().__init__(f"KV bookkeeping is broken ({len(self.violations)} violations): {shown}{more}")
