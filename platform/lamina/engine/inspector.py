"""What operators ask of a running engine: how prompts fare, where blocks are, whether they are what they should be."""

from __future__ import annotations

from collections.abc import Callable

from lamina.engine.commons import Commons, RootOf
from lamina.engine.errands import Errand
from lamina.engine.explain import Explainer
from lamina.engine.locate import Locate
from lamina.engine.tier_protocol import Below
from lamina.engine.verify import Verifier
from lamina.types import PrefixExplanation, PrefixOrder, PrefixReport, VerifyOrder, VerifyReport
from lamina_kvtier.identity import IdentityChain
from lamina_kvtier.manager import KvManager

__all__ = ["Inspector"]


class Inspector:
    """Changes nothing. Owned by the engine's thread; what it needs a store for it answers as an errand."""

    def __init__(
        self,
        kv: KvManager,
        below: Below | None,
        explainer: Explainer,
        commons: Commons,
        root_of: RootOf,
        *,
        block_bytes: int,
        check_integrity: Callable[[], None],
    ) -> None:
        """`check_integrity`: of all that the engine keeps books of. Raises IntegrityError."""
        self._kv, self._below, self._explainer, self._commons = kv, below, explainer, commons
        self._root_of, self._block_bytes = root_of, block_bytes
        self._verifier = Verifier(kv, below, check_integrity, explainer.in_store)

    def prefixes(self) -> PrefixReport:
        return self._explainer.report()

    def explain(self, order: PrefixOrder) -> Errand[PrefixExplanation]:
        return _Explaining(self, order)

    def verify(self, order: VerifyOrder) -> Errand[VerifyReport]:
        """Raises InvalidRequest."""
        return self._verifier.verify(order)

    def locate(self, order: PrefixOrder) -> Locate:
        """Of the blocks that a request with this prompt looks for: its last token is always computed."""
        chain = IdentityChain(self._root_of(order.adapter, order.namespace), self._kv.block_size)
        chain.extend(order.token_ids)
        usable = max(0, len(order.token_ids) - 1) // self._kv.block_size
        ids = chain.ids[:usable]
        pins = self._commons.pins_on(order.namespace, ids)
        return Locate(self._kv, self._below, self._explainer, ids, pins)

    def rooms(self) -> tuple[tuple[str, int], ...]:
        """(tier, bytes of more room) for which ghosts know what it would bring."""
        found = [("gpu", blocks) for blocks in self._kv.ghost_rooms]
        if self._below is not None:
            found += [("host", blocks) for blocks in self._below.host.ghost_rooms]
        return tuple((tier, blocks * self._block_bytes) for tier, blocks in found)

    def explanation(self, order: PrefixOrder, locate: Locate) -> PrefixExplanation | None:
        """Of what `locate` found; None while it looks."""
        located = locate.advance()
        if located is None:
            return None
        return PrefixExplanation(
            block_tokens=self._kv.block_size,
            block_bytes=self._block_bytes,
            blocks=sum(run.blocks for run in located.runs),
            runs=located.runs,
            store=located.store,
            prefixes=self._explainer.of(order.namespace),
            rooms=self.rooms(),
        )


class _Explaining:
    def __init__(self, inspector: Inspector, order: PrefixOrder) -> None:
        self._inspector, self._order, self._locate = inspector, order, inspector.locate(order)

    def advance(self) -> PrefixExplanation | None:
        return self._inspector.explanation(self._order, self._locate)
