"""The engine core: takes requests, runs steps, reports tokens. Synchronous and single-threaded."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from lamina.engine.adapters import AdapterLoads
from lamina.engine.batch import build_batch
from lamina.engine.commons import Commons
from lamina.engine.core_stats import core_stats
from lamina.engine.events import endings_of_unborn, token_event
from lamina.engine.explain import Explainer
from lamina.engine.failures import failure_of
from lamina.engine.flight import Flight
from lamina.engine.inspector import Inspector
from lamina.engine.intake import CoreLimits, Intake
from lamina.engine.patience import Patience
from lamina.engine.plan import StepPlan
from lamina.engine.request import Choice, ChoiceStatus, RequestState
from lamina.engine.runner import Runner
from lamina.engine.sampler import Sampled, StepSampler
from lamina.engine.sampling_state import SamplingState
from lamina.engine.scheduler import Scheduler
from lamina.engine.tier_protocol import Tiers
from lamina.errors import EngineInternal, InvalidRequest
from lamina.types import (
    EngineFailure,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerationRequest,
    TokenEvent,
)
from lamina_kvtier.identity import BlockId, IdentityChain, Layout, root_id
from lamina_kvtier.reasons import Reason

__all__ = ["EngineCore"]

_log = logging.getLogger(__name__)


class EngineCore:
    """One model, one block pool, many requests. `step()` is one forward pass.

    Between steps every block is accounted for (`check_integrity`). A fault in one request ends that request; a
    fault in a forward pass ends the requests that were in it.
    """

    def __init__(
        self,
        *,
        info: EngineInfo,
        layout: Layout,
        eos_token_ids: frozenset[int],
        limits: CoreLimits,
        scheduler: Scheduler,
        runner: Runner,
        sampler: StepSampler,
        adapters: AdapterLoads,
        tiers: Tiers,
        explainer: Explainer,
    ) -> None:
        """`tiers` are those that the scheduler asks, too."""
        self.info = info
        self.scheduler = scheduler
        self.commons = Commons(scheduler.kv, self._root, tiers)
        self.explainer = explainer
        scheduler.prefix_found, scheduler.prefix_taken = self._prefix_found, self._prefix_taken
        self.inspector = Inspector(
            scheduler.kv,
            tiers.below,
            explainer,
            self.commons,
            self._root,
            block_bytes=info.block_bytes,
            check_integrity=self.check_integrity,
        )
        self._layout = layout
        self._eos = eos_token_ids
        self._patience = Patience(limits.max_queue_s)
        self._intake = Intake(info, limits, scheduler.queue, self._patience, adapters)
        self._runner = runner
        self._sampler = sampler
        self._adapters = adapters
        self._tiers = tiers
        self._requests: dict[str, RequestState] = {}
        self._retiring: set[str] = set()  # adapters to unload when their last request has ended
        self._outbox: list[TokenEvent] = []
        self._counts: Counter[str] = Counter()
        self._flight: Flight | None = None  # launched and not landed yet
        self._step_seconds = 0.0
        self._arrivals = 0

    def warm_up(self) -> None:
        """Compiles and captures what steps need; may take minutes on a GPU. Before the first request."""
        self._runner.warm_up()
        self._sampler.warm_up()

    # --- inbox --------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request.

        Raises InvalidRequest (parameters, duplicate id), ContextLengthExceeded, ExceedsQuota (it could never fit),
        EngineOverloaded (queue full), LimitExceeded (the tenant's half of it), or a NotFound for an adapter that is not
        in the store.
        """
        if request.request_id in self._requests:
            raise InvalidRequest(f"A request with the id {request.request_id!r} is running already.")
        self._intake.check(request)
        self._arrivals += 1
        seed = request.sampling.seed
        state = RequestState(request, self._arrivals, secrets.randbits(63) if seed is None else seed)
        chain = IdentityChain(self._root(request.adapter, request.namespace), self.info.block_size)
        chain.extend(request.prompt_token_ids)
        choice = self._choice(state, 0, chain)
        self.scheduler.admission.require_possible(choice)
        self.scheduler.queue.push(choice)
        self._requests[request.request_id] = state
        state.submitted_at = self._patience.now()
        self._patience.waits(state)
        self._counts["prompt_tokens"] += len(request.prompt_token_ids)

    def _root(self, adapter: str | None, namespace: str) -> BlockId:
        return root_id(model_digest=self.info.model_digest, layout=self._layout, adapter=adapter, namespace=namespace)

    def _prefix_found(self, choice: Choice) -> None:
        self.commons.hit(choice.request.request.namespace, choice.chain.ids[: len(choice.table)])
        self.explainer.began(choice)

    def _prefix_taken(self, choice: Choice, ids: Sequence[BlockId]) -> None:
        lookup = choice.request.lookup
        missed = [] if lookup is None else [identity for identity in ids if identity in lookup.missing]
        self.commons.hit(choice.request.request.namespace, missed)
        self.explainer.taken(choice, ids)

    def _choice(self, state: RequestState, index: int, chain: IdentityChain) -> Choice:
        request = state.request
        sampling = SamplingState(
            state.params,
            seed=state.seed,
            index=index,
            prompt_token_ids=request.prompt_token_ids,
            eos_token_ids=self._eos,
            vocab_size=self.info.vocab_size,
        )
        prompt = list(request.prompt_token_ids)
        limit = min(len(prompt) + state.params.max_tokens, self.info.max_context)
        choice = Choice(state, index, prompt, chain, sampling, limit=limit)
        state.choices[index] = choice
        return choice

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Ends one choice, or all, at once; frees their blocks. Unknown or finished ids are ignored."""
        state = self._requests.get(request_id)
        if state is None:
            return
        if index is not None and index != 0 and index not in state.choices:
            state.cancelled.add(index)
            return
        if index == 0 and 0 in state.choices and state.choices[0].unborn:
            state.cancelled.add(0)  # its siblings still fork off it
            return
        for choice in list(state.choices.values()):
            if index is None or choice.index == index:
                self._finish(choice, FinishReason.CANCELLED)

    def unload_adapter(self, digest: str) -> None:
        """For a deleted one: drops its weights once no unfinished request uses it, waiting and preempted ones included,
        and the blocks that it computed at once and then again."""
        self._retiring.add(digest)
        self.commons.erasure.erase_adapter(digest)
        self._clear_deleted()

    def erase_namespace(self, namespace: str) -> None:
        """For a deleted tenant: its pins end, its blocks are dropped, and again once its last request has ended."""
        self.commons.erase(namespace)
        self._clear_deleted()

    def _clear_deleted(self) -> None:
        """Goes on with what waited for requests to end."""
        if not self._retiring and not self.commons.erasure.is_pending:
            return
        adapters = {state.request.adapter for state in self._requests.values()}
        for digest in self._retiring - adapters:
            self._adapters.unload(digest)
        self._retiring.intersection_update(adapters)
        requests = self._requests.values()
        self.commons.erasure.go_on({r.request.namespace for r in requests}, {r.adapter for r in requests})

    # --- step ---------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self._requests) or bool(self._outbox) or self._flight is not None

    def step(self) -> list[TokenEvent]:
        """Launches one forward pass and lands one; returns the events since the last call.

        If the sampler runs ahead, the pass that lands is the one before, so that the device never waits for this
        code; else it is the same one.
        """
        self.scheduler.look_ahead()
        self._tiers.settle()
        self.commons.expire()
        self._clear_deleted()
        self._refuse_overdue()
        plan = self.scheduler.plan()
        for choice, failure in plan.failures:
            self._finish(choice, FinishReason.ERROR, failure=failure)
        for choice in plan.preempted:
            self._sampler.leave(choice.sampling)
            self._patience.waits(choice.request)
        self._note_starts(plan)
        started = time.perf_counter()
        landing, self._flight = self._flight, self._launch(plan) if plan.chunks else None
        if landing is not None:
            self._land(landing)
        if self._flight is not None and not self._flight.ahead:
            landing, self._flight = self._flight, None
            self._land(landing)
        if plan.chunks:
            seconds = time.perf_counter() - started
            self._tiers.after_step(plan.tokens, seconds)
            self.scheduler.load_cost.computed(plan.tokens, seconds)
            self._step_seconds += seconds
            self._counts["steps"] += 1
        elif self._requests and landing is None and not plan.failures:
            # Nothing can run before an adapter has loaded, or blocks have come up.
            self._adapters.wait(seconds=0.001 if self._tiers.is_busy else 0.05)
        events, self._outbox = self._outbox, []
        return events

    def idle(self) -> float | None:
        """While there is no work: goes on with what no request waits for, within bounds. In how many seconds to call it
        again; None: only after another step."""
        again = self._tiers.idle()
        self._clear_deleted()
        return again

    def _refuse_overdue(self) -> None:
        """Ends requests that waited too long, before their first token."""
        for request_id, arrival in self._patience.overdue():
            state = self._requests.get(request_id)
            choice = None if state is None or state.arrival != arrival else state.choices.get(0)
            decision = None if choice is None else self.scheduler.refusal(choice)
            if choice is not None and decision is not None:
                failure = failure_of(self._patience.exceeded(decision))
                self._finish(choice, FinishReason.ERROR, failure=failure)

    def _note_starts(self, plan: StepPlan) -> None:
        now = self._patience.now()
        for chunk in plan.chunks:
            state = chunk.choice.request
            if state.queued_s is None:
                state.queued_s = now - state.submitted_at

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> Flight | None:
        """Starts a step: what it computes is booked now, since whatever runs later finds it done. None if it failed."""
        try:
            batch = build_batch(plan)
            self._tiers.before_step([*batch.fresh, *(copy.target for copy in batch.copies)])
            logits = self._runner.forward(batch)
            families = [[chunk.choice, *self._siblings(chunk.choice)] for chunk in batch.sampled]
            states = [choice.sampling for family in families for choice in family]
            draws = self._sampler.launch(_rows(logits, families), states)
        except (RuntimeError, ValueError, TypeError, LookupError, MemoryError) as error:
            self._crash(plan, error)
            return None
        flight = Flight(plan, families, draws, ahead=self._sampler.runs_ahead and all(len(f) == 1 for f in families))
        for chunk in batch.chunks:
            self.scheduler.computed(chunk)
        if flight.ahead:
            for (choice,) in families:
                choice.expect(self._sampler.placeholder(choice.sampling))
        return flight

    def _land(self, flight: Flight) -> None:
        """Takes in what a step drew. Choices that ended since it was launched are past caring."""
        try:
            sampled = flight.collect()
        except RuntimeError as error:
            self._crash(flight.plan, error)
            return
        for family in sampled:
            if family[0][0].status is ChoiceStatus.FINISHED:
                continue  # and with it, siblings that were to be born here
            for child, _ in family[1:]:
                self.scheduler.fork(family[0][0], child)
            for choice, token in family:
                if choice.status is not ChoiceStatus.FINISHED:
                    self._accept(choice, token)

    def _crash(self, plan: StepPlan, error: Exception) -> None:
        """Ends the requests of a failed step and forgets what it was to compute.

        An error of the device itself is passed on: no later step could succeed, so the process has to end and be
        started again. Running out of memory is not one.
        """
        if isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError):
            raise error
        _log.error("a forward pass over %d chunks failed", len(plan.chunks), exc_info=error)
        failure = EngineFailure(EngineInternal.code, f"The engine failed on this request: {error}")
        for chunk in plan.chunks:
            self.scheduler.kv.forget(chunk.choice.chain.ids, Reason.INTEGRITY)
            self._tiers.forget(chunk.choice.chain.ids)
            if chunk.choice.status is not ChoiceStatus.FINISHED:
                self._fail(chunk.choice, failure)

    def _siblings(self, parent: Choice) -> list[Choice]:
        siblings = range(1, 1 + parent.unborn)
        return [self._choice(parent.request, index, parent.chain.copy()) for index in siblings]

    def _accept(self, choice: Choice, sampled: Sampled) -> None:
        if choice.index in choice.request.cancelled:
            self._finish(choice, FinishReason.CANCELLED)
        elif sampled.failed is not None:
            failure = EngineFailure(EngineInternal.code, sampled.failed)
            self._finish(choice, FinishReason.ERROR, failure=failure)
        else:
            choice.append(sampled.token_id)
            self.explainer.settle(choice.request)
            self.scheduler.publish(choice)
            self._counts["generation_tokens"] += 1
            reason = self._finish_reason(choice, sampled.token_id)
            if reason is None:
                self._outbox.append(token_event(choice, sampled))
            else:
                self._finish(choice, reason, sampled=sampled)

    def _finish_reason(self, choice: Choice, token: int) -> FinishReason | None:
        params = choice.sampling.params
        if token in params.stop_token_ids or (token in self._eos and not params.ignore_eos):
            return FinishReason.STOP
        if choice.known >= choice.limit:
            return FinishReason.LENGTH
        return None

    # --- endings ------------------------------------------------------------------------------------------

    def _fail(self, choice: Choice, failure: EngineFailure) -> None:
        """Ends a choice and, if they are not born yet, the siblings that would have forked off it."""
        unborn = list(choice.request.choices.values()) if choice.unborn else [choice]
        for lost in unborn:
            self._finish(lost, FinishReason.ERROR, failure=failure)

    def _finish(
        self,
        choice: Choice,
        reason: FinishReason,
        *,
        sampled: Sampled | None = None,
        failure: EngineFailure | None = None,
    ) -> None:
        self.scheduler.finish(choice)
        self._sampler.leave(choice.sampling)
        state = choice.request
        self.explainer.settle(state)
        state.choices.pop(choice.index, None)
        self._outbox.append(token_event(choice, sampled, reason, failure))
        if choice.unborn:
            self._outbox += endings_of_unborn(choice, reason, failure)
        if not state.choices:
            self._requests.pop(state.request.request_id, None)
            self._patience.left()
            self._counts["cancelled" if reason is FinishReason.CANCELLED else "finished"] += 1
            self.scheduler.queue.forget_idle({other.request.tenant for other in self.scheduler.running})
            self._clear_deleted()

    # --- reports ------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        return core_stats(self.scheduler, self._tiers, self._adapters, self._counts, self._step_seconds)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every block, reference and adapter slot is accounted for."""
        self.scheduler.check_integrity()
        self.commons.check_integrity()
        self._adapters.check_integrity()
        self._tiers.check_integrity()

    def close(self) -> None:
        """Ends all requests, then saves what outlives this engine, for as long as is configured. Ends the loader
        thread, and lets go of weights and pool. Nothing may be called after it."""
        for request_id in list(self._requests):
            self.cancel(request_id)
        try:
            flight, self._flight = self._flight, None
            if flight is not None:
                self._land(flight)
            self._tiers.drain(self._clear_deleted)
        finally:
            self._adapters.close()
            self._tiers.close()
        # Weights and pool go now: the parts of an engine refer to each other, and would wait for the garbage collector.
        del self._runner, self._sampler


def _rows(logits: Tensor, families: Sequence[Sequence[Choice]]) -> Tensor:
    """One row per choice: siblings draw their first tokens from the same row. logits [families, V] -> [choices, V]."""
    if all(len(family) == 1 for family in families):
        return logits
    # Views, because a list of indexes would have to be copied to the device, which waits for it.
    return torch.cat([logits[row : row + 1].expand(len(family), -1) for row, family in enumerate(families)])
