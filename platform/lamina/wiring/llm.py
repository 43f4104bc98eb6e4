"""`lamina.LLM`: offline batches on the same engine that the server runs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.progress import Progress

from lamina.config import EngineConfig
from lamina.engine.choice_text import ChoiceText
from lamina.engine.core import EngineCore
from lamina.errors import InvalidRequest, ModelNotFound
from lamina.models.config import ModelConfig
from lamina.models.hub import resolve
from lamina.models.tokenizer import Tokenizer
from lamina.types import FinishReason, GenerationRequest, SamplingParams, TokenEvent, TokenLogprob
from lamina.wiring.core import build_core
from lamina.wiring.paths import default_cache
from lamina_lora.store import AdapterStore
from lamina_lora.validate import validate_adapter

__all__ = ["LLM", "ChoiceOutput", "RequestOutput"]

Prompt = str | Sequence[int]


@dataclass(slots=True)
class ChoiceOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class RequestOutput:
    prompt_token_ids: tuple[int, ...]
    choices: list[ChoiceOutput]
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids


class LLM:
    """One base model and any number of adapters, in this process.

    Example:
        with LLM("smollm2-135m-instruct", adapters={"pilot": "examples/adapters/harbour-pilot"}) as llm:
            outputs = llm.generate(["Hello", "Hello"], SamplingParams(max_tokens=32), adapter=["pilot", None])

    `model` is a catalogue name, a local Hugging Face folder or a hub id; `options` are fields of
    `lamina.config.EngineConfig`. Not thread-safe.
    """

    def __init__(self, model: str | Path, *, adapters: Mapping[str, str | Path] | None = None, **options: Any) -> None:
        """Raises UnsupportedModel, ModelFetchFailed, AdapterRejected, ConfigurationInvalid."""
        self._temporary = tempfile.TemporaryDirectory(prefix="lamina-adapters-")
        folder = resolve(str(model), default_cache())
        patient = {"max_queue_s": 0.0} | options  # whoever waits here is the caller itself
        config = EngineConfig(model=folder, adapters=Path(self._temporary.name), **patient)
        self.core = build_core(config)
        self.tokenizer = Tokenizer.from_folder(folder)
        self._store = AdapterStore(config.adapters)
        self._max_rank = config.max_lora_rank
        self._max_waiting = config.max_waiting
        self._folder = folder
        self._adapters: dict[str, str] = {}
        self._requests = 0
        for name, path in (adapters or {}).items():
            self.add_adapter(name, path)

    def add_adapter(self, name: str, folder: str | Path) -> str:
        """Validates a PEFT folder and makes it usable as `adapter=name`; returns its digest."""
        geometry = ModelConfig.from_folder(self._folder).geometry()
        manifest = validate_adapter(Path(folder), geometry, max_rank=self._max_rank)
        self._store.publish(Path(folder), manifest.digest)
        self._adapters[name] = manifest.digest
        return manifest.digest

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Completes every prompt (text or token ids), all in the same batches. Results in prompt order.

        `sampling` and `adapter` are one for all or one per prompt. Raises InvalidRequest and ModelNotFound.
        """
        batch = _as_batch(prompts)
        each_sampling = _per_prompt(sampling or SamplingParams(), len(batch), "sampling")
        each_adapter = _per_prompt(adapter, len(batch), "adapter")
        runs = [
            _Run(self._request(prompt, params, name), self.tokenizer)
            for prompt, params, name in zip(batch, each_sampling, each_adapter, strict=True)
        ]
        by_id = {run.request.request_id: run for run in runs}
        try:
            with Progress(disable=not progress) as bar:
                task = bar.add_task("generating", total=sum(run.request.sampling.n for run in runs))
                self._drive(runs, by_id, lambda done: bar.update(task, advance=done))
        finally:
            for run in runs:
                self.core.cancel(run.request.request_id)
        return [run.output() for run in runs]

    def _drive(self, runs: list[_Run], by_id: dict[str, _Run], advance: Any) -> None:
        room = max(1, min(self.core.info.max_running, self._max_waiting // 2))
        left = list(reversed(runs))
        while left or self.core.has_work():
            while left and self.core.stats().waiting < room:
                self.core.submit(left.pop().request)
            ended = 0
            for event in self.core.step():
                run = by_id.get(event.request_id)
                if run is not None:
                    ended += run.take(event, self.core)
            advance(ended)

    def _request(self, prompt: Prompt, params: SamplingParams, name: str | None) -> GenerationRequest:
        if name is not None and name not in self._adapters:
            raise ModelNotFound(name)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        self._requests += 1
        return GenerationRequest(
            request_id=f"offline-{self._requests}",
            prompt_token_ids=tuple(ids),
            sampling=replace(params),
            adapter=None if name is None else self._adapters[name],
        )

    def close(self) -> None:
        self.core.close()
        self._temporary.cleanup()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Run:
    """One request in flight: collects its choices' tokens and text."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        count = request.sampling.n
        self.request = request
        self._outputs = [ChoiceOutput(index) for index in range(count)]
        self._texts = [ChoiceText(index, tokenizer, request.sampling) for index in range(count)]
        self._cached = 0

    def take(self, event: TokenEvent, core: EngineCore) -> int:
        """Returns 1 if the event ended its choice. Raises EngineInternal if the engine failed on it."""
        text, output = self._texts[event.index], self._outputs[event.index]
        if text.done:
            return 0
        delta = text.advance(event)
        output.text += delta.text
        output.token_ids += delta.token_ids
        output.logprobs += delta.logprobs
        output.finish_reason = delta.finish_reason
        self._cached = max(self._cached, delta.cached_tokens)
        if delta.stop_string is not None:
            core.cancel(self.request.request_id, event.index)
        return int(text.done)

    def output(self) -> RequestOutput:
        return RequestOutput(self.request.prompt_token_ids, self._outputs, self._cached)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # one prompt: text or token ids
    return list(prompts)  # type: ignore[arg-type]


def _per_prompt(value: Any, count: int, name: str) -> list[Any]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts.", param=name)
        return list(value)
    return [value] * count
