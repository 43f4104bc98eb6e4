"""Beside a flood, who comes within its share gets whole steps at once: it waits for no more than the one under way."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fixtures.engines import request, tiny_core
from lamina.engine.core import EngineCore
from lamina.engine.plan import StepPlan
from lamina.types import QuotaPolicy, TierQuota

PROMPT, FLOODS = 96, 12
MOST_STEPS = 50  # it should need PROMPT / prefill


def recorded(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    plans: list[StepPlan] = []
    plan = core.scheduler.plan
    monkeypatch.setattr(core.scheduler, "plan", lambda: plans.append(plan()) or plans[-1])
    return plans


@pytest.mark.parametrize("prefill", [16, 32, 128])
def test_a_newcomer_has_the_prompt_tokens_of_the_next_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefill: int
) -> None:
    core = tiny_core(tmp_path, num_blocks=96, max_batch_tokens=256, max_running=8, max_prefill_tokens=prefill)
    core.commons.set_quotas([QuotaPolicy(namespace="b", gpu=TierQuota(reserved=16))])
    dice = random.Random(prefill)
    for number in range(FLOODS):
        core.submit(request(f"a{number}", dice.choices(range(3, 200), k=112), tenant="a", max_tokens=8))
    plans = recorded(core, monkeypatch)
    for _ in range(512 // prefill):
        core.step()
    assert any(choice.request.tenant == "a" for choice in core.scheduler.queue), "the flood goes on"
    core.submit(request("b", dice.choices(range(3, 200), k=PROMPT), tenant="b", max_tokens=1))
    plans.clear()
    answered = (any(event.request_id == "b" for event in core.step()) for _ in range(MOST_STEPS))
    assert any(answered), "the newcomer has no token after so many steps"
    parts = [sum(chunk.count for chunk in plan.chunks if chunk.choice.request.tenant == "b") for plan in plans]
    assert parts == [prefill] * (PROMPT // prefill) + [PROMPT % prefill] * bool(PROMPT % prefill)
    core.close()
