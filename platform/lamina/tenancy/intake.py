"""What the adapter service needs from the outside: a judge of adapter folders and a place for their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["AdapterFiles", "AdapterIntake", "ValidatedAdapter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedAdapter:
    """What validation found out."""

    digest: str  # hex; identity of weights + canonical config
    rank: int  # the largest of any module
    size_bytes: int  # of both files


class AdapterFiles(Protocol):
    """A store of adapter files, one folder per digest. Blocking calls, made from several threads at once."""

    def contains(self, digest: str) -> bool: ...

    def remove(self, digest: str) -> None:
        """Deletes the files; an unknown digest is no error."""
        ...

    def digests(self) -> tuple[str, ...]:
        """Everything that is published."""
        ...

    def sweep(self) -> int:
        """Deletes what killed publishers left behind long ago, and returns how much that was."""
        ...


class AdapterIntake(AdapterFiles, Protocol):
    """The store together with the judge of what may enter it."""

    def validate(self, folder: Path) -> ValidatedAdapter:
        """Raises InvalidAdapter with all violations."""
        ...

    def publish(self, folder: Path, adapter: ValidatedAdapter) -> None:
        """Puts the files in the store, atomically; a known digest is no error. Keeps `folder`,
        which must not have changed since. Raises InvalidAdapter if one of its files is gone.
        """
        ...
