"""In-memory twins of what the gateway stands on, for tests and experiments without database or model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lamina.errors import InvalidAdapter, InvalidRequest, ModelNotFound, NotFound, Unauthenticated
from lamina.tenancy.names import check_adapter_name, parse_reference
from lamina.tenancy.principal import ALL_SCOPES, Principal
from lamina.tenancy.records import AdapterRecord, AdapterStatus, DeletedAdapters, Page, PinEntry
from lamina.types import PinOrder, PinRecord, PinState, QuotaPolicy, TierQuota, TierSize

__all__ = ["ByteCodec", "InMemoryAdapters", "InMemoryKeys", "InMemoryPins", "InMemoryQuotas"]


class ByteCodec:
    """One token per byte of UTF-8; token 256 ends the sequence. Chats read "<role>text\\n"."""

    vocab_size = 257
    eos_id = 256
    eos_ids = frozenset({256})
    special_ids = frozenset({256})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = b"".join(self.token_bytes(token) for token in token_ids if token < 256 or not skip_special_tokens)
        return kept.decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        if messages[0]["role"] == "assistant":
            raise InvalidRequest("A conversation must not begin with the assistant.", param="messages")
        text = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        if continue_final_message:
            return text[:-1]
        return text + ("<assistant>" if add_generation_prompt else "")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<eos>"

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")


class InMemoryKeys:
    """Knows the keys that it issued."""

    def __init__(self) -> None:
        self._principals: dict[str, Principal] = {}

    def issue(self, tenant: str, *, scopes: frozenset[str] = ALL_SCOPES, weight: float = 1.0) -> str:
        """A new key of `tenant`, in the clear."""
        raw = f"lamina_test_{len(self._principals)}_{tenant}"
        self._principals[raw] = Principal(
            tenant_id=f"ten_{tenant}",
            tenant_name=tenant,
            key_id=f"key_{len(self._principals)}",
            scopes=scopes,
            weight=weight,
            namespace=_namespace(tenant),
        )
        return raw

    async def authenticate(self, raw: str) -> Principal:
        if raw not in self._principals:
            raise Unauthenticated
        return self._principals[raw]


class InMemoryAdapters:
    """Takes any folder with a JSON config and safetensors-named weights; the digest is a hash of both."""

    def __init__(self, *, base_model: str) -> None:
        self._base_model = base_model
        self._records: list[AdapterRecord] = []

    async def intake(self, tenant_id: str, *, name: str, folder: Path) -> AdapterRecord:
        check_adapter_name(name, base_model=self._base_model)
        config = (folder / "adapter_config.json").read_bytes()
        weights = (folder / "adapter_model.safetensors").read_bytes()
        try:
            rank = json.loads(config)["r"]
        except (ValueError, KeyError, TypeError) as exc:
            raise InvalidAdapter(["adapter_config.json is no JSON object with a rank r"]) from exc
        versions = [each.version for each in self._records if (each.tenant_id, each.name) == (tenant_id, name)]
        record = AdapterRecord(
            id=f"adp_{len(self._records):08d}",
            tenant_id=tenant_id,
            name=name,
            version=max(versions, default=0) + 1,
            digest=hashlib.sha256(config + weights).hexdigest(),
            base_model=self._base_model,
            rank=rank,
            size_bytes=len(weights),
            status=AdapterStatus.READY,
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
            created=True,
        )
        self._records.append(record)
        return record

    async def resolve(self, tenant_id: str, model_name: str) -> AdapterRecord:
        found = self._named(tenant_id, model_name)
        if not found:
            raise ModelNotFound(model_name)
        return found[-1]

    async def get(self, tenant_id: str, name_or_id: str) -> AdapterRecord:
        for record in self._mine(tenant_id):
            if record.id == name_or_id:
                return record
        return await self.resolve(tenant_id, name_or_id)

    async def list(self, tenant_id: str, *, after: str | None = None, limit: int = 20) -> Page[AdapterRecord]:
        newest = self._mine(tenant_id)[::-1]
        ids = [record.id for record in newest]
        if after is not None and after not in ids:
            raise InvalidRequest(f"after={after!r} is not the id of one of your adapters.", param="after")
        rest = newest[ids.index(after) + 1 if after else 0 :]
        data = rest[:limit]
        return Page(
            data=data,
            has_more=len(rest) > limit,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
        )

    async def delete(self, tenant_id: str, name_or_id: str) -> DeletedAdapters:
        gone = self._named(tenant_id, name_or_id) or (await self.get(tenant_id, name_or_id),)
        self._records = [record for record in self._records if record not in gone]
        left = {record.digest for record in self._records}
        unused = tuple(sorted({record.digest for record in gone} - left))
        return DeletedAdapters(retired=gone, removed_digests=unused)

    async def unowned(self, digests: Collection[str]) -> tuple[str, ...]:
        return tuple(sorted(set(digests) - {record.digest for record in self._records}))

    def _mine(self, tenant_id: str) -> tuple[AdapterRecord, ...]:
        return tuple(record for record in self._records if record.tenant_id == tenant_id)

    def _named(self, tenant_id: str, model_name: str) -> tuple[AdapterRecord, ...]:
        reference = parse_reference(model_name)
        if reference is None:
            return ()
        return tuple(
            record
            for record in self._mine(tenant_id)
            if record.name == reference.name and reference.version in (None, record.version)
        )


class InMemoryQuotas:
    """Policies by tenant name, for the namespaces of `InMemoryKeys`. Look at `pool`; `delete` a tenant."""

    def __init__(self) -> None:
        self._deleted: set[str] = set()
        self.pool: dict[str, int | TierSize | None] = {}
        self._policies: dict[str, QuotaPolicy] = {}

    def set(
        self,
        tenant: str,
        *,
        reserved: int = 0,
        limit: int | None = None,
        pins: int = 0,
        host: TierQuota | None = None,
        store: TierQuota | None = None,
    ) -> None:
        """The first three in blocks of the device pool, the others in bytes."""
        self._policies[tenant] = QuotaPolicy(
            namespace=_namespace(tenant),
            gpu=TierQuota(reserved=reserved, limit=limit, pin_limit=pins),
            host=host or TierQuota(),
            store=store or TierQuota(),
        )

    def delete(self, tenant: str) -> None:
        """With its policy."""
        self._policies.pop(tenant, None)
        self._deleted.add(_namespace(tenant))

    async def policies(self) -> tuple[QuotaPolicy, ...]:
        return tuple(self._policies.values())

    async def deleted(self, namespaces: frozenset[str]) -> frozenset[str]:
        return namespaces & self._deleted

    async def note_pool(self, **sizes: int | TierSize | None) -> None:
        self.pool = sizes

    async def tenants_of(self, namespaces: frozenset[str]) -> dict[str, str]:
        known = {_namespace(tenant): f"ten_{tenant}" for tenant in self._policies}
        return {namespace: known[namespace] for namespace in namespaces & known.keys()}


class InMemoryPins:
    """Keeps what it is given until it expires by the computer's clock."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[PinEntry, PinRecord, str]] = {}

    async def add(
        self, tenant_id: str, *, model: str, model_digest: str, order: PinOrder, pin: PinState, block_tokens: int
    ) -> PinEntry:
        entry = PinEntry(
            id=pin.pin_id,
            tenant_id=tenant_id,
            model=model,
            adapter_digest=order.adapter,
            floor=pin.floor,
            blocks=pin.blocks,
            clipped_blocks=pin.clipped_blocks,
            ttl_s=pin.ttl_s,
            hits=pin.hits,
            last_hit_at=None,
            expires_at=datetime.fromtimestamp(pin.expires_at, UTC),
            created_at=datetime.fromtimestamp(pin.created_at, UTC),
        )
        kept = replace(order, token_ids=order.token_ids[: pin.blocks * block_tokens])
        record = PinRecord(
            pin_id=pin.pin_id,
            order=kept,
            created_at=pin.created_at,
            expires_at=pin.expires_at,
            clipped_blocks=pin.clipped_blocks,
        )
        self._kept[pin.pin_id] = (entry, record, model_digest)
        return entry

    async def get(self, tenant_id: str, pin_id: str) -> PinEntry:
        entry = self._kept[pin_id][0] if pin_id in self._kept else None
        if entry is None or entry.tenant_id != tenant_id:
            raise NotFound(f"There is no pin {pin_id!r}.")
        return entry

    async def list(self, tenant_id: str) -> tuple[PinEntry, ...]:
        return tuple(entry for entry, _, _ in self._kept.values() if entry.tenant_id == tenant_id)

    async def update(self, tenant_id: str, pin: PinState) -> PinEntry:
        entry = await self.get(tenant_id, pin.pin_id)
        entry = replace(entry, ttl_s=pin.ttl_s, expires_at=datetime.fromtimestamp(pin.expires_at, UTC))
        _, record, digest = self._kept[pin.pin_id]
        self._kept[pin.pin_id] = (entry, replace(record, expires_at=pin.expires_at), digest)
        return entry

    async def remove(self, tenant_id: str, pin_id: str) -> None:
        await self.get(tenant_id, pin_id)
        del self._kept[pin_id]

    async def alive(self, model_digest: str) -> frozenset[str]:
        now = datetime.now(UTC)
        kept = self._kept.items()
        return frozenset(
            pin_id for pin_id, (entry, _, digest) in kept if digest == model_digest and entry.expires_at > now
        )

    async def records(self, pin_ids: Collection[str]) -> tuple[PinRecord, ...]:
        return tuple(record for pin_id, (_, record, _) in self._kept.items() if pin_id in pin_ids)

    async def note(self, pins: Sequence[PinState]) -> None:
        for pin in pins:
            if pin.pin_id in self._kept:
                entry, record, digest = self._kept[pin.pin_id]
                expires_at = datetime.fromtimestamp(pin.expires_at, UTC)
                self._kept[pin.pin_id] = (
                    replace(entry, hits=pin.hits, expires_at=expires_at),
                    replace(record, hits=pin.hits, expires_at=pin.expires_at),
                    digest,
                )


def _namespace(tenant: str) -> str:
    return hashlib.sha256(tenant.encode()).hexdigest()
