"""The replay pass: every request of a crowded run, alone on a fresh engine without tiers, has to say the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from fixtures.engines import Outputs, drive
from lamina.engine.core import EngineCore
from lamina.types import FinishReason, GenerationRequest

__all__ = ["Replay"]


class Replay:
    """Remembers what was said, since few distinct requests are drawn. `fresh` makes an engine that nobody used."""

    def __init__(self, fresh: Callable[[], EngineCore]) -> None:
        self._fresh = fresh
        self._said: dict[tuple[object, ...], list[list[int]]] = {}

    def expected(self, item: GenerationRequest) -> list[list[int]]:
        """Tokens of each of its choices."""
        key = (item.prompt_token_ids, item.adapter, item.sampling)
        if key not in self._said:
            core = self._fresh()
            tokens, _ = drive(core, [replace(item, request_id="alone")])
            core.close()
            self._said[key] = [tokens["alone", index] for index in range(item.sampling.n)]
        return self._said[key]

    def differences(
        self,
        requests: Iterable[GenerationRequest],
        tokens: Outputs,
        endings: Mapping[tuple[str, int], FinishReason],
        cancelled: Collection[str] = (),
    ) -> list[str]:
        """One sentence for each choice that said something else, or ended otherwise, than it does alone.

        What a cancelled one said until then has to be the beginning of what it says alone.
        """
        found = []
        for item in requests:
            for index, alone in enumerate(self.expected(item)):
                name = (item.request_id, index)
                said = tokens.get(name, [])
                if item.request_id in cancelled:
                    right = said == alone[: len(said)]
                else:
                    right = said == alone and endings.get(name) is FinishReason.LENGTH
                if not right:
                    found.append(f"{name} said {said}, not {alone} ({endings.get(name)})")
        return found
