"""Policy that the engine refuses: it keeps what it has, and is asked again until it takes it."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from fixtures.gateway import Kit
from lamina.gateway.policy import PolicyKeeper
from lamina.types import TierQuota

REFUSED = "the engine cannot keep the quotas; it goes on with those that it has"


async def told(keeper: PolicyKeeper, rounds: int = 1) -> list[str]:
    """What is logged as the reason, round by round."""
    with capture_logs() as lines:
        for _ in range(rounds):
            await keeper.round()
    return [line["reason"] for line in lines if line["event"] == REFUSED]


async def test_what_was_refused_is_tried_again_and_logged_once(kit: Kit) -> None:
    """The store grew, say: nothing changed in the database. Another reason is said again."""
    keeper = PolicyKeeper(kit.deps)
    kit.quotas.set("alice", reserved=10)
    kit.quotas.set("bob", store=TierQuota(reserved=1))
    [reason] = await told(keeper, 3)
    assert "the store" in reason
    assert not (await kit.engine.commons()).loaded
    kit.quotas.set("bob", store=TierQuota(reserved=2))
    assert len(await told(keeper, 3)) == 1
    kit.quotas.set("bob")
    assert await told(keeper, 2) == []
    assert (await kit.engine.commons()).loaded
    assert kit.engine.quotas_set == 1
    kit.quotas.set("bob", store=TierQuota(reserved=2))
    assert len(await told(keeper, 3)) == 1


async def test_an_engine_that_can_in_the_meantime_is_told(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any change of policy."""
    keeper = PolicyKeeper(kit.deps)
    kit.quotas.set("bob", store=TierQuota(reserved=1))
    await told(keeper, 2)
    below = kit.engine._shared()._below
    monkeypatch.setattr(below, "set_store_quotas", lambda quotas: None)
    assert await told(keeper, 2) == []
    assert (await kit.engine.commons()).loaded


async def test_pins_that_do_not_fit_are_not_tried_more_often_for_it(kit: Kit) -> None:
    """They fail under the policy that the engine has, and that one has not changed."""
    keeper = PolicyKeeper(kit.deps)
    kit.quotas.set("alice")
    await keeper.round()
    keeper._uncovered.add("pin_1")
    kit.quotas.set("bob", store=TierQuota(reserved=1))
    await told(keeper, 2)
    assert keeper._uncovered == {"pin_1"}
    kit.quotas.set("bob")
    await keeper.round()
    assert keeper._uncovered == set()
