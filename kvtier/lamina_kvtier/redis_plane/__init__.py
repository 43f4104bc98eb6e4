"""Raw RESP to one Redis or Valkey server, made for large values: no copies, bounded waits, no client library.

Read in this order: `plane.py` (what there is), `work.py` (requests and who may touch them), `lane.py` (one connection),
`requests.py`, `connection.py`, `stream.py`, `resp.py`, `breaker.py`, `address.py`. For quotas: `ledger.lua` (rules),
`ledger.py` (its calls), `script.py`, `chain.py`.
"""

from lamina_kvtier.redis_plane.address import InvalidAddress, RedisAddress
from lamina_kvtier.redis_plane.breaker import Backoff, State
from lamina_kvtier.redis_plane.plane import PlaneConfig, PlaneCounters, RedisPlane
from lamina_kvtier.redis_plane.requests import Ask, Fetch, Store
from lamina_kvtier.redis_plane.resp import Bounds, ErrorReply, Reply, ValueReply
from lamina_kvtier.redis_plane.work import Batch, Failure, Request, Step

__all__ = [
    "Ask",
    "Backoff",
    "Batch",
    "Bounds",
    "ErrorReply",
    "Failure",
    "Fetch",
    "InvalidAddress",
    "PlaneConfig",
    "PlaneCounters",
    "RedisAddress",
    "RedisPlane",
    "Reply",
    "Request",
    "State",
    "Step",
    "Store",
    "ValueReply",
]
