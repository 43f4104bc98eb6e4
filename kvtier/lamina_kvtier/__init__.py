"""Paged KV storage: block identity, block pool, prefix index, manager."""

from lamina_kvtier.blocks import BlockUsage, CopyOnWrite, PrefixMatch
from lamina_kvtier.errors import BlockMisuse, IntegrityError, InvalidIdentity, KvError, OutOfBlocks
from lamina_kvtier.identity import BlockId, IdentityChain, Layout, child_id, root_id
from lamina_kvtier.manager import KvManager

__all__ = [
    "BlockId",
    "BlockMisuse",
    "BlockUsage",
    "CopyOnWrite",
    "IdentityChain",
    "IntegrityError",
    "InvalidIdentity",
    "KvError",
    "KvManager",
    "Layout",
    "OutOfBlocks",
    "PrefixMatch",
    "child_id",
    "root_id",
]
