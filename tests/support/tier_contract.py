"""What every StoreTier promises, as tests: subclass `TierContract` and give it a `make_tier` fixture.

    class TestMyTier(TierContract):
        @pytest.fixture
        def make_tier(self): ...        # (layout=LAYOUT, block_bytes=BLOCK_BYTES) -> StoreTier; all on one empty store

The fixture closes what it made. Tests assume nothing about time except that operations end within their deadline.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import pytest

from lamina_kvtier.tier import BlockKey, Outcome, StoreTier, Tally

__all__ = ["BLOCK_BYTES", "LAYOUT", "OTHER_LAYOUT", "PATIENCE_S", "MakeTier", "TierContract"]

BLOCK_BYTES = 6 * 1024
LAYOUT, OTHER_LAYOUT = b"\x01" * 32, b"\x02" * 32
PATIENCE_S = 30.0  # a hang must end the test, nothing else may depend on it

MakeTier = Callable[..., StoreTier]


def keys(count: int, namespace: str = "tenant", adapter: bytes = b"\x07" * 32) -> list[BlockKey]:
    """Blocks that no other call has named."""
    return [BlockKey(os.urandom(32), namespace, adapter) for _ in range(count)]


def ids(blocks: Sequence[BlockKey]) -> list[bytes]:
    return [key.id for key in blocks]


def blocks(count: int, block_bytes: int = BLOCK_BYTES) -> list[memoryview]:
    """Random contents, without a byte of noise in common."""
    return [memoryview(os.urandom(block_bytes)) for _ in range(count)]


def room(count: int, block_bytes: int = BLOCK_BYTES) -> list[memoryview]:
    return [memoryview(bytearray(b"\xee" * block_bytes)) for _ in range(count)]


def put(tier: StoreTier, names: Sequence[BlockKey], values: Sequence[memoryview]) -> tuple[Outcome, ...]:
    return tier.put(names, values).result(PATIENCE_S)


def load(tier: StoreTier, names: Sequence[BlockKey], into: Sequence[memoryview]) -> tuple[Outcome, ...]:
    return tier.load(ids(names), into).result(PATIENCE_S)


def lookup(tier: StoreTier, names: Sequence[BlockKey]) -> Tally:
    return tier.lookup(ids(names)).result(PATIENCE_S)


class TierContract:
    @pytest.fixture
    def tier(self, make_tier: MakeTier) -> StoreTier:
        return make_tier()

    # What is stored comes back

    @pytest.mark.parametrize("count", [1, 7, 300])
    def test_what_was_put_is_found_and_loaded(self, tier: StoreTier, count: int) -> None:
        """Bit for bit, in any number."""
        names, values, into = keys(count), blocks(count), room(count)
        assert put(tier, names, values) == (Outcome.OK,) * count
        assert lookup(tier, names) == Tally(count, Outcome.OK)
        assert load(tier, names, into) == (Outcome.OK,) * count
        assert into == values

    def test_any_order_and_any_number_of_times(self, tier: StoreTier) -> None:
        """A load names blocks as it likes, the same one twice too."""
        names, values = keys(3), blocks(3)
        put(tier, names, values)
        into = room(4)
        assert load(tier, [names[2], names[0], names[2], names[1]], into) == (Outcome.OK,) * 4
        assert into == [values[2], values[0], values[2], values[1]]

    def test_putting_again_changes_nothing(self, tier: StoreTier) -> None:
        """Equal identity means equal contents; twice in one operation too."""
        names, values, into = keys(2), blocks(2), room(2)
        assert put(tier, [*names, names[0]], [*values, values[0]]) == (Outcome.OK,) * 3
        assert put(tier, names, values) == (Outcome.OK,) * 2
        assert load(tier, names, into) == (Outcome.OK,) * 2
        assert into == values

    def test_memory_from_inside_an_arena(self, tier: StoreTier) -> None:
        """Values and destinations are slices of larger memory, and nothing beside them is touched."""
        names = keys(2)
        source = memoryview(bytearray(os.urandom(3 * BLOCK_BYTES + 5)))
        values = [source[5 : 5 + BLOCK_BYTES], source[5 + 2 * BLOCK_BYTES :]]
        assert put(tier, names, values) == (Outcome.OK,) * 2
        arena = memoryview(bytearray(b"\xee" * (3 * BLOCK_BYTES)))
        into = [arena[:BLOCK_BYTES], arena[2 * BLOCK_BYTES :]]
        assert load(tier, names, into) == (Outcome.OK,) * 2
        assert into == values
        assert set(arena[BLOCK_BYTES : 2 * BLOCK_BYTES]) == {0xEE}

    def test_values_may_be_written_again_once_done(self, tier: StoreTier) -> None:
        """What was stored is a copy."""
        names = keys(1)
        value = memoryview(bytearray(os.urandom(BLOCK_BYTES)))
        before = bytes(value)
        assert put(tier, names, [value]) == (Outcome.OK,)
        value[:] = bytes(BLOCK_BYTES)
        into = room(1)
        assert load(tier, names, into) == (Outcome.OK,)
        assert into == [before]

    # What is not there

    def test_an_unknown_block_is_missing(self, tier: StoreTier) -> None:
        names = keys(3)
        assert lookup(tier, names) == Tally(0, Outcome.MISSING)
        assert load(tier, names, room(3)) == (Outcome.MISSING,) * 3

    def test_a_look_up_counts_leading_blocks(self, tier: StoreTier) -> None:
        """What lies behind a gap does not count, wherever the gap is."""
        names = keys(40)
        put(tier, names, blocks(40))
        for gap in (0, 1, 20, 39):
            broken = [*names[:gap], *keys(1), *names[gap + 1 :]]
            assert lookup(tier, broken) == Tally(gap, Outcome.MISSING)

    def test_outcomes_are_by_block(self, tier: StoreTier) -> None:
        """A missing block in the middle spoils none of the others."""
        names, values, into = keys(9), blocks(9), room(9)
        there = [0, 1, 3, 4, 8]
        put(tier, [names[at] for at in there], [values[at] for at in there])
        outcomes = load(tier, names, into)
        assert [at for at, outcome in enumerate(outcomes) if outcome is Outcome.OK] == there
        assert {outcome for outcome in outcomes if outcome is not Outcome.OK} == {Outcome.MISSING}
        assert [into[at] for at in there] == [values[at] for at in there]

    def test_a_deleted_block_is_missing(self, tier: StoreTier) -> None:
        """And the answer says how many there were."""
        names, into = keys(4), room(4)
        put(tier, names, blocks(4))
        assert tier.delete([names[1].id, names[3].id, os.urandom(32)]).result(PATIENCE_S) == Tally(2, Outcome.OK)
        assert lookup(tier, names) == Tally(1, Outcome.MISSING)
        assert load(tier, names, into) == (Outcome.OK, Outcome.MISSING, Outcome.OK, Outcome.MISSING)
        assert tier.delete(ids(names)).result(PATIENCE_S) == Tally(2, Outcome.OK)

    def test_nothing_is_nothing(self, tier: StoreTier) -> None:
        assert put(tier, [], []) == ()
        assert load(tier, [], []) == ()
        assert lookup(tier, []) == Tally(0, Outcome.OK)
        assert tier.delete([]).result(PATIENCE_S) == Tally(0, Outcome.OK)

    # Sharing, and what must never match

    def test_another_replica_finds_what_this_one_stored(self, make_tier: MakeTier) -> None:
        """Also after this one is gone: as after a restart."""
        first, second = make_tier(), make_tier()
        names, values, into = keys(5), blocks(5), room(5)
        assert put(first, names, values) == (Outcome.OK,) * 5
        assert lookup(second, names) == Tally(5, Outcome.OK)
        first.close()
        assert load(second, names, into) == (Outcome.OK,) * 5
        assert into == values

    def test_another_layout_never_matches(self, make_tier: MakeTier) -> None:
        """Same identity, same length: not found, or refused when it is read; and the own block is not harmed."""
        mine, other = make_tier(), make_tier(layout=OTHER_LAYOUT)
        names, values = keys(2), blocks(2)
        put(mine, names, values)
        assert set(load(other, names, room(2))) <= {Outcome.MISSING, Outcome.WRONG_LAYOUT}

    def test_another_size_of_block_never_matches(self, make_tier: MakeTier) -> None:
        """Neither smaller nor larger; nothing beyond the destination is written."""
        mine = make_tier()
        names = keys(2)
        put(mine, names, blocks(2))
        for size in (BLOCK_BYTES // 2, BLOCK_BYTES * 2):
            other = make_tier(block_bytes=size)
            outcomes = load(other, names, room(2, size))
            assert set(outcomes) <= {Outcome.MISSING, Outcome.WRONG_LAYOUT, Outcome.CORRUPT}

    # Operations

    def test_many_operations_at_once(self, tier: StoreTier) -> None:
        """Asked for before any result is waited for; each ends with its own."""
        names, values = [keys(4) for _ in range(16)], [blocks(4) for _ in range(16)]
        puts = [tier.put(*pair) for pair in zip(names, values, strict=True)]
        assert [operation.result(PATIENCE_S) for operation in puts] == [(Outcome.OK,) * 4] * 16
        into = [room(4) for _ in range(16)]
        loads = [tier.load(ids(some), places) for some, places in zip(names, into, strict=True)]
        lookups = [tier.lookup(ids(some)) for some in names]
        assert [operation.result(PATIENCE_S) for operation in lookups] == [Tally(4, Outcome.OK)] * 16
        assert [operation.result(PATIENCE_S) for operation in loads] == [(Outcome.OK,) * 4] * 16
        assert into == values

    def test_any_thread_may_ask(self, tier: StoreTier) -> None:
        """Four threads, each with blocks of its own."""
        wrong: list[str] = []

        def work() -> None:
            for _ in range(5):
                names, values, into = keys(3), blocks(3), room(3)
                put(tier, names, values)
                if load(tier, names, into) != (Outcome.OK,) * 3 or into != values:
                    wrong.append("another thread's blocks")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert wrong == []

    def test_results_stay(self, tier: StoreTier) -> None:
        """Asking again gives the same; an ended operation is done and can be cancelled in vain."""
        operation = tier.put(keys(1), blocks(1))
        assert operation.result(PATIENCE_S) == (Outcome.OK,)
        assert operation.done()
        operation.cancel()
        assert operation.result(0) == (Outcome.OK,)

    def test_a_cancelled_operation_ends_and_lets_go_of_memory(self, tier: StoreTier) -> None:
        """Each block was carried out or CANCELLED, and once done nothing is written any more."""
        names, values, into = keys(64), blocks(64), room(64)
        put(tier, names, values)
        operation = tier.load(ids(names), into)
        operation.cancel()
        outcomes = operation.result(PATIENCE_S)
        assert operation.done()
        assert set(outcomes) <= {Outcome.OK, Outcome.CANCELLED}
        for outcome, place, value in zip(outcomes, into, values, strict=True):
            assert outcome is not Outcome.OK or place == value
        for place in into:
            place[:] = bytes(BLOCK_BYTES)
        again = room(64)
        assert load(tier, names, again) == (Outcome.OK,) * 64
        assert again == values
        assert all(place == bytes(BLOCK_BYTES) for place in into)

    # Misuse

    def test_lengths_must_fit(self, tier: StoreTier) -> None:
        """Refused before anything is stored."""
        names = keys(2)
        for values in (blocks(1), blocks(2, BLOCK_BYTES - 1), [*blocks(1), *blocks(1, BLOCK_BYTES + 1)]):
            with pytest.raises(ValueError, match=r"\d"):
                tier.put(names, values)
            with pytest.raises(ValueError, match=r"\d"):
                tier.load(ids(names), values)
        assert lookup(tier, names) == Tally(0, Outcome.MISSING)

    def test_destinations_must_be_writable(self, tier: StoreTier) -> None:
        with pytest.raises(ValueError, match="writ"):
            tier.load(ids(keys(1)), [memoryview(bytes(BLOCK_BYTES))])

    def test_views_must_be_contiguous(self, tier: StoreTier) -> None:
        with pytest.raises(ValueError, match="contiguous"):
            tier.put(keys(1), [memoryview(bytearray(2 * BLOCK_BYTES))[::2]])

    # Accounts

    def test_usage_counts_outcomes(self, tier: StoreTier) -> None:
        """By block, since the start; and what is stored takes room."""
        names = keys(3)
        put(tier, names[:2], blocks(2))
        load(tier, names, room(3))
        usage = tier.usage()
        assert usage.puts[Outcome.OK] == 2
        assert usage.loads[Outcome.OK] == 2
        assert usage.loads[Outcome.MISSING] == 1
        assert usage.bytes >= 2 * BLOCK_BYTES or usage.bytes == 0  # 0: the tier does not know yet
        assert usage.limit is None or usage.limit > 0

    def test_a_tier_has_a_name(self, tier: StoreTier) -> None:
        assert tier.name

    # The end

    def test_a_closed_tier_is_unavailable(self, tier: StoreTier) -> None:
        """It answers at once, and closing again is nothing."""
        names = keys(2)
        put(tier, names, blocks(2))
        tier.close()
        tier.close()
        tallies = lookup(tier, names), tier.delete(ids(names)).result(PATIENCE_S)
        outcomes = *put(tier, names, blocks(2)), *load(tier, names, room(2)), *(tally.outcome for tally in tallies)
        assert set(outcomes) <= {Outcome.UNAVAILABLE, Outcome.CANCELLED}
        assert [tally.blocks for tally in tallies] == [0, 0]

    def test_closing_ends_what_is_under_way(self, tier: StoreTier) -> None:
        """Whatever became of it, it has let go of all memory."""
        names, values, into = keys(64), blocks(64), room(64)
        put(tier, names, values)
        operations = [tier.load(ids(names), into), tier.put(names, values)]
        tier.close()
        assert all(operation.done() for operation in operations)
        for operation in operations:
            assert set(operation.result(0)) <= {Outcome.OK, Outcome.CANCELLED, Outcome.UNAVAILABLE}
