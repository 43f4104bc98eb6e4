"""Paged KV storage: block identity, block pool, prefix index, manager, quotas, pins."""

from lamina_kvtier.admission import Cause, Decision, Verdict
from lamina_kvtier.blocks import BlockUsage, CopyOnWrite, PrefixMatch
from lamina_kvtier.errors import (
    BlockMisuse,
    IntegrityError,
    InvalidIdentity,
    InvalidQuota,
    KvError,
    LedgerMisuse,
    OutOfBlocks,
    OverLimit,
    PolicyNotLoaded,
    QuotaNotCoverable,
    Refused,
    UnknownPin,
)
from lamina_kvtier.identity import BlockId, IdentityChain, Layout, child_id, root_id
from lamina_kvtier.ledger import Charge, Ledger
from lamina_kvtier.manager import UNOWNED, KvManager
from lamina_kvtier.pin_types import Denial, Floor, Granting, Pin, PinCount, PinGrant
from lamina_kvtier.pins import PinBook, PinTarget, PinTier
from lamina_kvtier.quota import Quota, QuotaBook

__all__ = [
    "UNOWNED",
    "BlockId",
    "BlockMisuse",
    "BlockUsage",
    "Cause",
    "Charge",
    "CopyOnWrite",
    "Decision",
    "Denial",
    "Floor",
    "Granting",
    "IdentityChain",
    "IntegrityError",
    "InvalidIdentity",
    "InvalidQuota",
    "KvError",
    "KvManager",
    "Layout",
    "Ledger",
    "LedgerMisuse",
    "OutOfBlocks",
    "OverLimit",
    "Pin",
    "PinBook",
    "PinCount",
    "PinGrant",
    "PinTarget",
    "PinTier",
    "PolicyNotLoaded",
    "PrefixMatch",
    "Quota",
    "QuotaBook",
    "QuotaNotCoverable",
    "Refused",
    "UnknownPin",
    "Verdict",
    "child_id",
    "root_id",
]
