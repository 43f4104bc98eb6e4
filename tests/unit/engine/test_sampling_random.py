"""Philox and the uniforms made from it."""

from __future__ import annotations

import numpy as np
import pytest

from lamina.engine.sampling_random import philox, uniforms

MASK = 0xFFFFFFFF


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The definition in Salmon et al. (2011), one counter at a time."""
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & MASK,
            (first >> 32) ^ counter[3] ^ key[1],
            first & MASK,
        ]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return counter


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([MASK] * 4, [MASK] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter: list[int], key: list[int], answer: str) -> None:
    """Agrees with the vectors that Random123 publishes for Philox-4x32-10."""
    words = philox(np.array([counter], dtype=np.uint64).T, np.array([key], dtype=np.uint64).T)
    assert [f"{word:08x}" for word in words[:, 0].tolist()] == answer.split()


def test_many_counters_at_once_agree_with_one_at_a_time() -> None:
    """Vectorizing changes nothing."""
    generator = np.random.default_rng(5)
    counters = generator.integers(0, 2**32, (4, 100), dtype=np.uint64)
    keys = generator.integers(0, 2**32, (2, 100), dtype=np.uint64)
    expected = [plain_philox(c, k) for c, k in zip(counters.T.tolist(), keys.T.tolist(), strict=True)]
    assert philox(counters, keys).T.tolist() == expected


def test_the_layout_of_counter_and_key_is_fixed() -> None:
    """Key = seed; counter = position (64 bits), choice, stream 0; 27 + 26 bits of the first two words.

    Changing it would change every seeded answer.
    """
    seed, index, position = 0x0123456789ABCDEF, 3, 2**32 + 9
    words = plain_philox([9, 1, 3, 0], [0x89ABCDEF, 0x01234567])
    expected = ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53
    assert uniforms([seed], [index], [position]).tolist() == [expected]


def test_any_integer_is_a_seed_modulo_two_to_the_64() -> None:
    """Negative seeds are their two's complement; every 64-bit value is its own stream."""
    seeds = [-1, 2**64 - 1, -(2**63), 2**63, 0, 2**64]
    a, b, c, d, e, f = uniforms(seeds, [0] * 6, [0] * 6).tolist()
    assert a == b
    assert c == d
    assert e == f
    assert len({a, c, e}) == 3


def test_numbers_look_uniform_and_independent_along_every_axis() -> None:
    """Pairs of neighbouring seeds, choices and positions fill 16 x 16 cells evenly (fixed inputs)."""
    count = 20_000
    line, zero = list(range(count + 1)), [0] * (count + 1)
    for axes in ((line, zero, zero), (zero, line, zero), (zero, zero, line)):
        numbers = uniforms(*axes)
        assert 0 <= numbers.min() < numbers.max() < 1
        cells, *_ = np.histogram2d(numbers[:-1], numbers[1:], bins=16, range=[[0, 1], [0, 1]])
        chi2 = float(((cells - count / 256) ** 2).sum() / (count / 256))
        assert 160 < chi2 < 350  # 255 degrees of freedom: far tails on both sides are suspect


def test_no_rows_make_no_numbers() -> None:
    """An empty batch is fine."""
    assert uniforms([], [], []).shape == (0,)
