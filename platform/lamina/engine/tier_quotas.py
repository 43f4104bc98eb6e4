"""Quotas of all tiers, taken over together: all of them, or none. No tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from lamina.engine.host_commons import HostCommons
from lamina.errors import InvalidRequest, QuotaNotCoverable
from lamina.types import QuotaPolicy, TierQuota
from lamina_kvtier import errors as kv_errors
from lamina_kvtier.identity import BlockId
from lamina_kvtier.quota import Quota, QuotaBook
from lamina_kvtier.tier import BlockKey, TierUsage

__all__ = ["PoolOnly", "TierQuotas", "TiersBelow"]

_UNBOUNDED = 2**62  # bytes: who has no limit, where nobody knows how large the tier is


class TiersBelow(Protocol):
    """What is shared below the device pool; `lamina.engine.tiers` has it."""

    @property
    def commons_of_host(self) -> HostCommons | None:
        """None: host memory is no tier of its own."""
        ...

    def set_store_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """In bytes, by namespace; all of them, or none. Raises QuotaNotCoverable, InvalidQuota of `lamina_kvtier`."""
        ...

    def store_usage(self) -> TierUsage | None:
        """None: there is no store."""
        ...

    def save_pins(self, pinned: Callable[[], Iterable[BlockId]]) -> None:
        """From now on what `pinned` names is copied to the store, too: pins keep it on the device."""
        ...

    def forget_where(self, wanted: Callable[[BlockKey], bool]) -> None:
        """Host memory drops what these keys stand for, because somebody deleted that. O(slots)."""
        ...

    def forget_in_store(self, namespace: str) -> None:
        """So does the store with all that a namespace pays for, if it knows: without quotas it does not."""
        ...

    def moves(self, wanted: Callable[[BlockKey], bool]) -> bool:
        """Whether a transfer of such a block is under way, so that it may appear in another tier yet."""
        ...


class PoolOnly:
    """There is nothing below, so nothing of it can be reserved."""

    @property
    def commons_of_host(self) -> HostCommons | None:
        return None

    def set_store_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """See TiersBelow."""
        require_nothing(quotas)

    def store_usage(self) -> TierUsage | None:
        """See TiersBelow."""
        return None

    def save_pins(self, pinned: Callable[[], Iterable[BlockId]]) -> None:
        """See TiersBelow."""

    def forget_where(self, wanted: Callable[[BlockKey], bool]) -> None:
        """Nothing is below."""

    def forget_in_store(self, namespace: str) -> None:
        """There is none."""

    def moves(self, wanted: Callable[[BlockKey], bool]) -> bool:
        """See TiersBelow."""
        return False


def require_nothing(quotas: Mapping[str, Quota]) -> None:
    """Raises the QuotaNotCoverable of `lamina_kvtier` for anything reserved of a tier that is not there."""
    need = sum(quota.reserved for quota in quotas.values())
    if need:
        raise kv_errors.QuotaNotCoverable(None, limit=0, need=need, have=0)


@dataclass(frozen=True, slots=True)
class _Words:
    tier: str
    noun: str
    unit: str
    remedy: str  # where there is no such tier


_GPU = _Words("gpu", "the device pool", "blocks", "Lower a reservation.")
_HOST = _Words(
    "host", "host memory", "bytes", "This engine keeps no blocks there: set LAMINA_HOST_KV_BYTES, or lower them to 0."
)
_STORE = _Words(
    "store",
    "the store",
    "bytes",
    "There is none, or it has no maxmemory: set LAMINA_KV_STORE_URL or LAMINA_KV_STORE_BYTES, or lower them to 0.",
)


class TierQuotas:
    """Writes policies into the books of the tiers."""

    def __init__(self, pool: QuotaBook, below: TiersBelow) -> None:
        self._pool, self._below, self._host = pool, below, below.commons_of_host

    def set(self, policies: Sequence[QuotaPolicy]) -> None:
        """Replaces all quotas of all tiers. Raises QuotaNotCoverable, InvalidRequest; then nothing changed."""
        gpu: dict[str, Quota] = {}
        host: dict[str, Quota] = {}
        store: dict[str, Quota] = {}
        for policy in policies:
            with _explained(_GPU):
                gpu[policy.namespace] = _quota(policy.gpu, policy.weight, self._pool.capacity)
            with _explained(_HOST):
                host[policy.namespace] = self._host_quota(policy)
            with _explained(_STORE):
                store[policy.namespace] = _quota(policy.store, policy.weight, _UNBOUNDED)
        with _explained(_GPU):
            self._pool.require_coverable(gpu)
        with _explained(_HOST, unit=1 if self._host is None else self._host.tier.block_bytes):
            self._require_host(host)
        with _explained(_STORE):
            self._below.set_store_quotas(store)  # the last that may refuse, so it may act as well
        self._pool.load(gpu)
        if self._host is not None:
            self._host.book.load(host)

    def _require_host(self, quotas: Mapping[str, Quota]) -> None:
        if self._host is None:
            require_nothing(quotas)
        else:
            self._host.book.require_coverable(quotas)

    def _host_quota(self, policy: QuotaPolicy) -> Quota:
        if self._host is None:
            return _quota(policy.host, policy.weight, _UNBOUNDED)
        return self._host.quota(policy.host, policy.weight)


def _quota(wanted: TierQuota, weight: float, capacity: int) -> Quota:
    whole = max(capacity, wanted.reserved)  # more than there is, is not coverable rather than invalid
    return Quota(wanted.reserved, whole if wanted.limit is None else wanted.limit, wanted.pin_limit, weight)


@contextmanager
def _explained(words: _Words, *, unit: int = 1) -> Iterator[None]:
    """Says in errors which tier it is about, in the unit in which people set quotas. `unit`: of the tier's book."""
    try:
        yield
    except kv_errors.InvalidQuota as error:
        raise InvalidRequest(f"The quota of {words.noun} is none. {error}") from error
    except kv_errors.QuotaNotCoverable as error:
        need, limit = error.need * unit, error.limit * unit
        raise QuotaNotCoverable(
            f"{need} {words.unit} of {words.noun} are wanted for all tenants together, but {limit} can be promised. "
            f"{'Lower a reservation first.' if limit else words.remedy}",
            limit=limit,
            need=need,
            have=error.have * unit,
            tier=words.tier,
        ) from error
