"""Properties of API keys: no text breaks the door, and a key's life follows a simple model."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from fixtures.tenancy import SECRET, Time
from lamina.errors import Conflict, Unauthenticated
from lamina.tenancy import migrate
from lamina.tenancy.cache import TtlCache
from lamina.tenancy.database import Database
from lamina.tenancy.keyformat import INVALID_KEY, ApiKey
from lamina.tenancy.keys import KeyService
from lamina.tenancy.lastused import LastUsed
from lamina.tenancy.principal import ALL_SCOPES
from lamina.tenancy.tenants import TenantService

TTL_S = 5.0
PIECES = st.sampled_from(["lamina", "_", "live", "test", "a" * 16, "b" * 52, "\0", "\n", "é", "7", "0", " "])
KEY_LIKE = st.lists(PIECES, max_size=12).map("".join) | st.from_regex(
    r"lamina_[a-z0-9]{1,17}_[a-z2-7]{15,17}_[a-z2-7]{51,53}", fullmatch=True
)
ANYTHING = KEY_LIKE | st.text(max_size=300) | st.binary(max_size=300) | st.none() | st.integers()


@given(raw=ANYTHING)
@settings(max_examples=150, deadline=None)
def test_parsing_answers_with_a_key_or_unauthenticated(raw: object) -> None:
    """No input raises anything else, and what parses was written exactly so."""
    try:
        key = ApiKey.parse(raw)
    except Unauthenticated as error:
        message = error.message
    else:
        assert key.raw == raw
        return
    assert message == INVALID_KEY


@given(flips=st.lists(st.tuples(st.integers(0, 200), st.characters()), min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_a_changed_key_never_has_the_same_mac(flips: list[tuple[int, str]]) -> None:
    """Every character counts."""
    original = ApiKey("live", "a" * 16, "b" * 52)
    text = list(original.raw)
    for position, character in flips:
        text[position % len(text)] = character
    changed = "".join(text)
    try:
        key = ApiKey.parse(changed)
    except Unauthenticated:
        return
    assert (key.mac(SECRET) == original.mac(SECRET)) == (changed == original.raw)


@pytest.fixture(scope="module")
def template() -> Any:
    folder = Path(mkdtemp(prefix="lamina-keys-"))
    asyncio.run(migrate.upgrade(f"sqlite+aiosqlite:///{folder / 'template.db'}"))
    yield folder / "template.db"
    shutil.rmtree(folder)


@dataclass
class Model:
    """What should be true of one key."""

    raw: str
    key_id: str
    scopes: frozenset[str]
    expires_at: datetime | None
    revoked: bool = False
    replaced: bool = False
    stale_until: datetime | None = None  # the second process may still accept it until then

    def alive(self, now: datetime) -> bool:
        return not self.revoked and (self.expires_at is None or now < self.expires_at)


class KeyLife(RuleBasedStateMachine):
    """Two processes on one SQLite file; every change is made through the first one.

    At any time the first accepts exactly the living keys. The second accepts every living key too, and a dead
    one only within the cache time after the change.
    """

    template: Path
    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.time = Time()
        self.folder = Path(mkdtemp(prefix="lamina-keys-"))
        shutil.copy(self.template, self.folder / "lamina.db")
        self.database = Database.open(f"sqlite+aiosqlite:///{self.folder / 'lamina.db'}")
        self.here, self.there = self._service(), self._service()
        tenants = TenantService(database=self.database, clock=self.time)
        self.tenant = self.run(tenants.create(name="acme"))
        self.models: list[Model] = []

    def _service(self) -> KeyService:
        return KeyService(
            database=self.database,
            secret=SECRET,
            cache=TtlCache(ttl_s=TTL_S, capacity=3, monotonic=self.time.monotonic),
            last_used=LastUsed(database=self.database, interval_s=3600),
            clock=self.time,
        )

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def accepts(self, service: KeyService, model: Model) -> bool:
        try:
            principal = self.run(service.authenticate(model.raw))
        except Unauthenticated as error:
            if error.message == INVALID_KEY:
                raise  # the holder of the secret must learn why
            return False
        assert (principal.key_id, principal.scopes) == (model.key_id, model.scopes)
        return True

    @rule(
        target=keys,
        scopes=st.sets(st.sampled_from(sorted(ALL_SCOPES)), min_size=1),
        life=st.none() | st.integers(1, 20),
    )
    def issue(self, scopes: set[str], life: int | None) -> Model:
        expires_at = None if life is None else self.time.now + timedelta(seconds=life)
        issued = self.run(self.here.issue(self.tenant.id, name="k", scopes=scopes, expires_at=expires_at))
        model = Model(issued.raw, issued.record.id, frozenset(scopes), expires_at)
        self.models.append(model)
        return model

    @rule(model=keys)
    def revoke(self, model: Model) -> None:
        self.run(self.here.revoke(model.key_id))
        if not model.revoked:
            model.revoked, model.stale_until = True, self.time.now + timedelta(seconds=TTL_S)

    @rule(target=keys, model=keys, overlap=st.integers(0, 20))
    def rotate(self, model: Model, overlap: int) -> Any:
        now = self.time.now
        if model.replaced or not model.alive(now):
            with pytest.raises(Conflict):
                self.run(self.here.rotate(model.key_id, overlap=timedelta(seconds=overlap)))
            return multiple()
        inherited = model.expires_at
        rotated = self.run(self.here.rotate(model.key_id, overlap=timedelta(seconds=overlap)))
        end = now + timedelta(seconds=overlap)
        model.expires_at = end if inherited is None else min(inherited, end)
        model.replaced, model.stale_until = True, now + timedelta(seconds=TTL_S)
        successor = Model(rotated.issued.raw, rotated.issued.record.id, model.scopes, inherited)
        self.models.append(successor)
        return successor

    @rule(seconds=st.sampled_from([0.5, 1, 4, 5, 6]))
    def wait(self, seconds: float) -> None:
        self.time.advance(seconds=seconds)

    @rule(model=keys)
    def use_there(self, model: Model) -> None:
        accepted, alive = self.accepts(self.there, model), model.alive(self.time.now)
        stale = model.stale_until is not None and self.time.now < model.stale_until
        assert accepted or not alive
        assert alive or stale or not accepted

    @rule(model=keys, secret=st.text(alphabet="abcdefghijklmnopqrstuvwxyz234567", min_size=52, max_size=52))
    def guess(self, model: Model, secret: str) -> None:
        guessed = ApiKey("live", ApiKey.parse(model.raw).public_id, secret)
        with pytest.raises(Unauthenticated) as caught:
            self.run(self.here.authenticate(guessed.raw))
        assert caught.value.message == INVALID_KEY

    @rule(model=consumes(keys))
    def forget(self, model: Model) -> None:
        self.models.remove(model)

    @invariant()
    def here_accepts_exactly_the_living(self) -> None:
        for model in self.models:
            assert self.accepts(self.here, model) == model.alive(self.time.now)

    def teardown(self) -> None:
        self.run(self.here.close())
        self.run(self.there.close())
        records = self.run(self.here.list())
        assert all(record.last_used_at is None or record.last_used_at <= self.time.now for record in records)
        self.run(self.database.close())
        self.loop.close()
        shutil.rmtree(self.folder)


def test_the_life_of_keys(template: Path) -> None:
    """Issue, use, rotate, revoke and wait in any order: the service agrees with the model."""
    KeyLife.template = template
    run_state_machine_as_test(KeyLife, settings=settings(max_examples=10, stateful_step_count=15, deadline=None))
