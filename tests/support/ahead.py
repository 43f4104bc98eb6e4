"""An engine whose steps run ahead, as on a device, with the host's own arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from lamina.config import EngineConfig
from lamina.engine.batch import Batch
from lamina.engine.pool import BlockPool
from lamina.engine.runner import Runner
from lamina.engine.sampler import Sampled, Sampler
from lamina.engine.sampling_state import SamplingState
from lamina.models.interface import CausalLM
from lamina.models.layers import TorchOps
from lamina.wiring.backends import StepParts, TorchBackend
from lamina_lora.slots import AdapterSlots

__all__ = ["AheadBackend", "AheadSampler"]


class _Late:
    """Draws that nobody may see before `collect`, which may be called once."""

    def __init__(self, outcomes: list[Sampled]) -> None:
        self._outcomes: list[Sampled] | None = outcomes

    def collect(self) -> list[Sampled]:
        outcomes, self._outcomes = self._outcomes, None
        assert outcomes is not None, "collected twice"
        return outcomes


class AheadSampler:
    """A `StepSampler` that advances copies of the states itself; the originals' owner gets its draws a step late."""

    runs_ahead = True

    def __init__(self) -> None:
        self._sampler = Sampler()
        self._shadows: dict[SamplingState, SamplingState] = {}
        self._seats: dict[SamplingState, int] = {}
        self._last: dict[int, int] = {}  # by seat
        self.launches = 0

    def launch(self, logits: Tensor, states: Sequence[SamplingState]) -> _Late:
        self.launches += 1
        for state in states:
            if state not in self._shadows:
                self._shadows[state] = copy.deepcopy(state)
                self._seats[state] = next(seat for seat in range(1000) if seat not in self._seats.values())
        shadows = [self._shadows[state] for state in states]
        outcomes = self._sampler.sample(logits.clone(), shadows)
        for state, shadow, outcome in zip(states, shadows, outcomes, strict=True):
            if outcome.failed is None:
                shadow.append(outcome.token_id)
            self._last[self._seats[state]] = max(outcome.token_id, 0)
        return _Late(outcomes)

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def placeholder(self, state: SamplingState) -> int:
        return -1 - self._seats[state]

    def leave(self, state: SamplingState) -> None:
        self._shadows.pop(state, None)
        self._seats.pop(state, None)

    def feed(self, token_ids: np.ndarray) -> np.ndarray:
        return np.array([self._last[-1 - token] if token < 0 else token for token in token_ids.tolist()])


class _FedRunner:
    def __init__(self, runner: Runner, sampler: AheadSampler) -> None:
        self._runner, self._sampler = runner, sampler

    def warm_up(self) -> None:
        self._runner.warm_up()

    def forward(self, batch: Batch) -> Tensor:
        return self._runner.forward(replace(batch, token_ids=self._sampler.feed(batch.token_ids)))


class AheadBackend:
    """`TorchBackend` whose steps run ahead."""

    ops = TorchOps()

    def parts(self, model: CausalLM, pool: BlockPool, config: EngineConfig) -> StepParts:
        parts, sampler = TorchBackend().parts(model, pool, config), AheadSampler()

        def runner(slots: AdapterSlots) -> _FedRunner:
            return _FedRunner(parts.runner(slots), sampler)

        return StepParts(parts.table, sampler, runner)
