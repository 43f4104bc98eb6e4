"""The soak finds mistakes: each of these, made on purpose, changes what somebody says or breaks the books."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fixtures.engines import publish_adapter, tiny_core, write_adapter
from lamina.engine.core import EngineCore
from lamina.engine.pool import BlockPool
from lamina.wiring.backends import TorchBackend
from lamina_kvtier.block_codec import BlockCodec
from lamina_kvtier.blocks import CopyOnWrite
from lamina_kvtier.errors import KvError
from lamina_kvtier.fault_tier import Faults
from lamina_kvtier.host_tier import HostTier
from lamina_kvtier.manager import KvManager
from lamina_kvtier.memory_tier import MemoryStore
from lamina_kvtier.tier import Operation, Outcome, StoreTier
from support.ahead import AheadBackend
from support.poison import LateLane, LateTransfer, PoisonedBelow
from support.replay import Replay
from support.soak import SMALL, Crowd

_SEEDS = 6  # crowds until one has to notice

Mutate = Callable[[pytest.MonkeyPatch], type[PoisonedBelow]]


class _NeverWaited(LateTransfer):
    """Nobody asks whether it has happened."""

    def done(self) -> bool:
        super().done()
        return True

    def wait(self) -> None:
        """Takes it for done."""

    gate = wait


class _HastyLane(LateLane):
    def submit(self, work: Callable[[], None]) -> LateTransfer:
        transfer = _NeverWaited(self, work, looks=12)
        self._waiting.append(transfer)
        for late in self._waiting[:-3]:
            self.run_until(late)
        return transfer


class _Hasty(PoisonedBelow):
    """Its first lane is for spills, the second for promotions."""

    which: int

    def lane(self) -> LateLane:
        self.made_lanes = getattr(self, "made_lanes", 0) + 1
        return _HastyLane(self.dice) if self.made_lanes == self.which + 1 else super().lane()


def spills_are_taken_for_done(patch: pytest.MonkeyPatch) -> type[PoisonedBelow]:
    """The block is reused, and the slot is found, while the spill is in flight."""
    return type("Hasty", (_Hasty,), {"which": 0})


def promotions_are_taken_for_done(patch: pytest.MonkeyPatch) -> type[PoisonedBelow]:
    """The request runs on blocks that have not come up yet."""
    return type("Hasty", (_Hasty,), {"which": 1})


class _Ungated(LateTransfer):
    def gate(self) -> None:
        """The step does not wait."""


class _UngatedLane(LateLane):
    def submit(self, work: Callable[[], None]) -> LateTransfer:
        transfer = _Ungated(self, work, looks=self._dice.choice((3, 8)))
        self._waiting.append(transfer)
        return transfer


def steps_overwrite_what_is_being_spilled(patch: pytest.MonkeyPatch) -> type[PoisonedBelow]:
    """A block is reused while its spill is in flight; what is stored is somebody else's."""
    return type("Ungated", (PoisonedBelow,), {"lane": lambda self: _UngatedLane(self.dice)})


def slots_are_not_held(patch: pytest.MonkeyPatch) -> type[PoisonedBelow]:
    """A slot is reused while it is promoted, or written to the store."""
    for name in ("hold", "release", "put_back"):
        patch.setattr(HostTier, name, lambda self, slots: None)
    return PoisonedBelow


class _AllWell:
    """Whatever became of it."""

    def __init__(self, inner: Operation[tuple[Outcome, ...]]) -> None:
        self._inner = inner

    def done(self) -> bool:
        return self._inner.done()

    def result(self, timeout: float | None = None) -> tuple[Outcome, ...]:
        return (Outcome.OK,) * len(self._inner.result(timeout))

    def cancel(self) -> None:
        self._inner.cancel()


def misses_of_the_store_are_taken_for_blocks(patch: pytest.MonkeyPatch) -> type[PoisonedBelow]:
    """The outcome of a load is not looked at."""

    class Below(PoisonedBelow):
        def store_tier(self, codec: BlockCodec) -> StoreTier | None:
            tier = super().store_tier(codec)
            if self.fault_tier is not None:
                load = self.fault_tier.load
                patch.setattr(self.fault_tier, "load", lambda *asked, **more: _AllWell(load(*asked, **more)))
            return tier

    return Below


def new_blocks_are_not_cleared(patch: pytest.MonkeyPatch) -> type[PoisonedBelow]:
    patch.setattr(BlockPool, "clear", lambda self, blocks: None)
    return PoisonedBelow


def shared_blocks_are_written_in_place(patch: pytest.MonkeyPatch) -> type[PoisonedBelow]:
    def in_place(self: KvManager, block: int, *, owner: str | None = None) -> CopyOnWrite | None:
        return None

    patch.setattr(KvManager, "make_writable", in_place)
    patch.setattr(KvManager, "is_shared", lambda self, block: False)
    return PoisonedBelow


def identities_leave_out_the_adapter(patch: pytest.MonkeyPatch) -> type[PoisonedBelow]:
    root = EngineCore._root
    patch.setattr(EngineCore, "_root", lambda self, adapter, namespace: root(self, None, namespace))
    return PoisonedBelow


def references_are_dropped_twice(patch: pytest.MonkeyPatch) -> type[PoisonedBelow]:
    """Of each table's last block, as long as somebody else has it, too."""
    release = KvManager.release

    def too_often(self: KvManager, blocks: Sequence[int]) -> None:
        release(self, blocks)
        if blocks and self._references[blocks[0]] > 0:
            release(self, blocks[:1])

    patch.setattr(KvManager, "release", too_often)
    return PoisonedBelow


MUTANTS: list[Mutate] = [
    spills_are_taken_for_done,
    promotions_are_taken_for_done,
    steps_overwrite_what_is_being_spilled,
    slots_are_not_held,
    misses_of_the_store_are_taken_for_blocks,
    new_blocks_are_not_cleared,
    shared_blocks_are_written_in_place,
    identities_leave_out_the_adapter,
    references_are_dropped_twice,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutants")


@pytest.fixture(scope="module")
def adapters(folder: Path) -> list[str | None]:
    return [None, publish_adapter(folder, write_adapter(folder / "peft", rank=5, seed=5))]


@pytest.fixture(scope="module")
def replay(folder: Path) -> Replay:
    return Replay(lambda: tiny_core(folder, prefix_caching=False, max_batch_tokens=512))


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_mistake_is_found(folder: Path, adapters: list[str | None], replay: Replay, mutate: Mutate) -> None:
    for seed in range(_SEEDS):
        with pytest.MonkeyPatch.context() as patch:
            if _findings(folder, adapters, replay, mutate(patch), seed):
                return
    raise AssertionError(f"none of {_SEEDS} crowds noticed")


def test_nothing_is_found_where_there_is_no_mistake(folder: Path, adapters: list[str | None], replay: Replay) -> None:
    for seed in range(2):
        assert _findings(folder, adapters, replay, PoisonedBelow, seed) == []


def _findings(
    folder: Path, adapters: list[str | None], replay: Replay, below: type[PoisonedBelow], seed: int
) -> list[str]:
    crowd = Crowd(seed, adapters, count=25)
    broken = _play(folder, crowd, below, seed)
    return broken or crowd.differences(replay)


def _play(folder: Path, crowd: Crowd, below_class: type[PoisonedBelow], seed: int) -> list[str]:
    faults = Faults(vanished=0.1, truncated=0.1, flipped=0.1)
    below = below_class(host=12, store=MemoryStore(), seed=seed, faults=faults)
    backend = (TorchBackend(), AheadBackend())[seed % 2]
    core = tiny_core(folder, backend=backend, tiers=below, **SMALL)
    try:
        crowd.run(core, below.tick)
    except (KvError, AssertionError) as broken:
        return [f"{type(broken).__name__}: {broken}"]
    finally:
        core._adapters.close()
    return []
