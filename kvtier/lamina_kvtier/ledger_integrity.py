"""Proof of a ledger: its sums, its charges, and who is charged. O(namespaces + open charges), reads only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lamina_kvtier.accounts import Account, Charge, out_of_reach
from lamina_kvtier.quota import QuotaBook

__all__ = ["Sums", "find_contradictions"]


@dataclass(frozen=True, slots=True)
class Sums:
    """Over all accounts, as the ledger has them. Units."""

    committed: int
    held: int
    promised: int


def find_contradictions(
    book: QuotaBook,
    accounts: Mapping[str, Account],
    charges: Iterable[Charge],
    sums: Sums,
    used: Mapping[str, int] | None,
) -> list[str]:
    """Every broken rule, one sentence each; empty if all is well. `used`: units by namespace, counted elsewhere."""
    found = _charged(accounts, charges)
    for name, account in accounts.items():
        who = f"ledger: {name!r}"
        if not 0 <= account.idle <= account.committed:
            found.append(f"{who} has {account.committed} units, but {account.idle} idle ones")
        if account.quota != book.of(name):
            found.append(f"{who} is judged by an old quota")
        if (account.held, account.promised) != out_of_reach(account):
            found.append(f"{who} holds {account.held} and {account.promised}, which is not what it has")
    for field in ("committed", "held", "promised"):
        if sum(getattr(account, field) for account in accounts.values()) != getattr(sums, field):
            found.append(f"ledger: {field} units of all namespaces are not {getattr(sums, field)}")
    if not 0 <= sums.committed <= book.capacity:
        found.append(f"ledger: {sums.committed} units are used of {book.capacity}")
    return found if used is None else found + _miscounted(accounts, used)


def _charged(accounts: Mapping[str, Account], charges: Iterable[Charge]) -> list[str]:
    """What is pending and ahead is what the open charges say."""
    pending, ahead = (dict.fromkeys(accounts, 0) for _ in range(2))
    for charge in charges:
        pending[charge.namespace] = pending.get(charge.namespace, 0) + charge.pending
        ahead[charge.namespace] = ahead.get(charge.namespace, 0) + charge.ahead
    found = [f"ledger: {name!r} has charges, but no account" for name in pending if name not in accounts]
    for name, account in accounts.items():
        if account.pending != pending[name]:
            found.append(f"ledger: {name!r} has {account.pending} pending units, but its charges say otherwise")
        if account.ahead != ahead[name]:
            found.append(f"ledger: {name!r} has {account.ahead} units ahead, but its charges say otherwise")
    return found


def _miscounted(accounts: Mapping[str, Account], used: Mapping[str, int]) -> list[str]:
    charged = {name: account.committed for name, account in accounts.items()}
    return [
        f"ledger: {name!r} is charged for {charged.get(name, 0)} units, but uses {used.get(name, 0)}"
        for name in sorted({*used, *charged})
        if charged.get(name, 0) != used.get(name, 0)
    ]
