"""What a cold adapter load costs its tenant in the fair queue, in tokens."""

from __future__ import annotations

from lamina_kvtier.policies import Rate

__all__ = ["LoadCost"]

_HALF_LIFE = 20_000.0  # tokens


class LoadCost:
    """As many tokens as the engine would have computed meanwhile, by the rate measured lately.

    A tenant that calls for ever new adapters keeps the one loader busy and pushes others' adapters out, and without
    this it would pay for its tokens only. Seconds and not bytes, because reading and unpacking is what takes time, at a
    rate that the disk decides. Bounded, because a load that hangs must not put its tenant back for minutes; and nothing
    until a step has been measured.
    """

    def __init__(self, most: int) -> None:
        """`most`: tokens that one load may cost."""
        self._most = most
        self._rate = Rate(prior=1.0, prior_units=1e-9, half_life=_HALF_LIFE)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step."""
        self._rate.observe(tokens, seconds)

    def tokens(self, seconds: float) -> int:
        """For a load that took so long."""
        if not self._rate.count:
            return 0
        return min(self._most, round(seconds / self._rate.seconds_per_unit))
