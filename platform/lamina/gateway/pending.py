"""Uploads in parts: a folder each, until they are completed, cancelled or an hour old.

    <uploads>/pending-<upload id>/about.json      whose it is, and what was announced
                                  part_<id>        one file per part, renamed here when it is complete

All state is on disk, so that an upload outlives a restart. Who takes a folder away (to complete, cancel or expire
it) renames it first: of two who try, one succeeds, and after a crash `staging.sweep` knows the new name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lamina.errors import InvalidRequest, LimitExceeded, NotFound, TooLarge
from lamina.gateway import staging

__all__ = ["MAX_PART_BYTES", "PendingUpload", "PendingUploads"]

MAX_PART_BYTES = 64 << 20
TTL_S = 3600
MAX_PER_TENANT = 16
CHUNK = 1 << 20
_ID = re.compile(r"(?:upload|part)_[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class PendingUpload:
    id: str
    tenant_id: str
    filename: str  # the client's; only ever shown
    size: int  # bytes announced
    created_at: int  # Unix seconds

    @property
    def expires_at(self) -> int:
        return self.created_at + TTL_S


class PendingUploads:
    """All uploads in parts under one root. Methods block; call them from threads."""

    def __init__(self, root: Path, *, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()  # sizes are summed and files added as one step

    def create(self, tenant_id: str, *, filename: str, size: int) -> PendingUpload:
        """Raises TooLarge, or LimitExceeded if this tenant has too many open."""
        if size > self._max_bytes:
            raise TooLarge(limit_bytes=self._max_bytes)
        self._root.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self.sweep()
            self._check_quota(tenant_id)
            upload = PendingUpload(_new("upload"), tenant_id, filename, size, int(self._clock()))
            folder = self._folder(upload.id)
            folder.mkdir(mode=0o700)
            (folder / "about.json").write_text(json.dumps(asdict(upload)))
        return upload

    def get(self, tenant_id: str, upload_id: str) -> PendingUpload:
        """Raises NotFound, for another tenant's and for an expired one too."""
        upload = self._read(self._folder(upload_id)) if _ID.fullmatch(upload_id) else None
        if upload is None or upload.tenant_id != tenant_id or upload.expires_at <= self._clock():
            raise NotFound(f"There is no open upload {upload_id[:64]!r}: uploads stay open for {TTL_S} s.")
        return upload

    def add(self, upload: PendingUpload, part: Path) -> str:
        """Moves the complete file `part` into the upload; its part id. Raises InvalidRequest, NotFound."""
        part_id, folder = _new("part"), self._folder(upload.id)
        with self._lock:
            total = sum(each.stat().st_size for each in folder.glob("part_*")) + part.stat().st_size
            if total > upload.size:
                raise InvalidRequest(
                    f"The parts add up to {total} bytes, but {upload.size} were announced. Start a new upload.",
                    param="data",
                )
            try:
                part.rename(folder / part_id)
            except FileNotFoundError:
                raise NotFound(f"The upload {upload.id!r} is not open any more.") from None
        return part_id

    def assemble(self, upload: PendingUpload, part_ids: Sequence[str], folder: Path, *, md5: str | None) -> Path:
        """Ends the upload: one file in `folder`, the parts in this order.

        Raises InvalidRequest if parts are unknown, repeated, incomplete or don't match `md5`, and NotFound if
        somebody else ended the upload first. An upload with a wrong list stays open.
        """
        self._check_parts(upload, part_ids)
        taken = self._take(upload, folder)
        whole, digest = taken / "whole", hashlib.md5(usedforsecurity=False)
        with whole.open("xb") as out:
            for part_id in part_ids:
                with (taken / part_id).open("rb") as part:
                    while chunk := part.read(CHUNK):
                        digest.update(chunk)
                        out.write(chunk)
                (taken / part_id).unlink()  # or it would all be there twice
        if md5 is not None and digest.hexdigest() != md5.lower():
            raise InvalidRequest(f"The MD5 of what arrived is {digest.hexdigest()}. Upload it again.", param="md5")
        return whole

    def cancel(self, upload: PendingUpload, folder: Path) -> None:
        """Ends the upload; `folder` is where its files go, for the caller to remove. Raises NotFound."""
        self._take(upload, folder)

    def sweep(self) -> None:
        """Removes expired uploads, and folders as old that a crash has left without a readable `about.json`."""
        for folder in self._root.glob("pending-*"):
            if self._is_over(folder):
                doomed = self._root / f"{staging.PREFIX}expired-{folder.name}"
                with contextlib.suppress(FileNotFoundError):  # another one took it
                    folder.rename(doomed)
                    shutil.rmtree(doomed, ignore_errors=True)

    def _is_over(self, folder: Path) -> bool:
        upload = self._read(folder)
        if upload is not None:
            return upload.expires_at <= self._clock()
        try:
            return folder.stat().st_mtime + TTL_S <= self._clock()
        except FileNotFoundError:
            return False

    def _check_quota(self, tenant_id: str) -> None:
        found = [self._read(folder) for folder in self._root.glob("pending-*")]
        mine = sum(upload is not None and upload.tenant_id == tenant_id for upload in found)
        if mine >= MAX_PER_TENANT:
            raise LimitExceeded(
                f"This tenant has {mine} of at most {MAX_PER_TENANT} uploads open. Complete or cancel one first.",
                limit=MAX_PER_TENANT,
                need=1,
                have=0,
            )

    def _check_parts(self, upload: PendingUpload, part_ids: Sequence[str]) -> None:
        folder = self._folder(upload.id)
        known = {part.name: part.stat().st_size for part in folder.glob("part_*")}
        if len(set(part_ids)) != len(part_ids) or not set(part_ids) <= known.keys():
            raise InvalidRequest("part_ids has repeated ids, or ids that are not of this upload.", param="part_ids")
        total = sum(known[part_id] for part_id in part_ids)
        if total != upload.size:
            raise InvalidRequest(
                f"The parts add up to {total} bytes, but {upload.size} were announced. Upload what is missing.",
                param="part_ids",
            )

    def _take(self, upload: PendingUpload, folder: Path) -> Path:
        target = folder / "parts"
        try:
            self._folder(upload.id).rename(target)
        except FileNotFoundError:
            raise NotFound(f"The upload {upload.id!r} is not open any more.") from None
        return target

    def _folder(self, upload_id: str) -> Path:
        return self._root / f"pending-{upload_id}"

    def _read(self, folder: Path) -> PendingUpload | None:
        try:
            return PendingUpload(**json.loads((folder / "about.json").read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None  # taken away or being created just now, or never completely written


def _new(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"
