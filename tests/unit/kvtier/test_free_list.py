"""The queue of unheld blocks."""

from __future__ import annotations

import pytest

from lamina_kvtier.free_list import FreeList


def test_starts_with_all_blocks_in_ascending_order() -> None:
    """A new pool hands out block 0 first."""
    queue = FreeList(4)
    assert list(queue) == [0, 1, 2, 3]
    assert (len(queue), 3 in queue) == (4, True)


def test_pops_from_the_front_until_empty() -> None:
    """Popped blocks are gone; the empty queue is a sound ring."""
    queue = FreeList(3)
    assert [queue.pop_front() for _ in range(3)] == [0, 1, 2]
    assert (len(queue), list(queue), 1 in queue) == (0, [], False)
    assert queue.broken_links() == []


@pytest.mark.parametrize("block", [0, 1, 2])
def test_removes_from_front_middle_and_end(block: int) -> None:
    """Removal keeps the order of the rest."""
    queue = FreeList(3)
    queue.remove(block)
    assert list(queue) == [other for other in range(3) if other != block]
    assert block not in queue
    assert queue.broken_links() == []


def test_pushes_at_either_end() -> None:
    """Front means next victim, back means last victim; the same from empty."""
    queue = FreeList(3)
    for _ in range(3):
        queue.pop_front()
    queue.push_back(1)
    queue.push_front(2)
    queue.push_back(0)
    assert list(queue) == [2, 1, 0]


def test_a_queue_of_one_block() -> None:
    """The smallest ring: sentinel and one block."""
    queue = FreeList(1)
    assert queue.pop_front() == 0
    queue.push_back(0)
    assert (list(queue), queue.broken_links()) == ([0], [])


@pytest.mark.parametrize(
    ("links", "at", "value"),
    [
        ("_following", 1, 3),
        ("_following", 2, -1),
        ("_previous", 2, 0),
        ("_following", 4, 1),
        ("_following", 3, 0),
    ],
)
def test_broken_links_are_found(links: str, at: int, value: int) -> None:
    """A skipped, cut, backwards or endless ring is reported, and the search for it ends."""
    queue = FreeList(4)
    getattr(queue, links)[at] = value
    assert queue.broken_links()


def test_a_wrong_length_is_found() -> None:
    """The counter is checked against the ring in both directions."""
    for wrong in (3, 5):
        queue = FreeList(4)
        queue._length = wrong
        assert queue.broken_links()
