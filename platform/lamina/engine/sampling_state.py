"""What sampling must remember about one choice. Free of torch; the scheduler owns and advances it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lamina.engine.sampling_random import SEED_MASK
from lamina.errors import InvalidRequest
from lamina.types import SamplingParams

__all__ = ["SamplingState", "TokenHistory"]


class TokenHistory:
    """The distinct tokens of a prompt and its output, with how often each is in the output.

    `ids` and `counts` are views of equal length, in order of first appearance; `append` is O(1) amortized.
    """

    __slots__ = ("_counts", "_ids", "_size", "_slots")

    def __init__(self, prompt_token_ids: Sequence[int], *, vocab_size: int) -> None:
        """Raises InvalidRequest for a prompt token outside of the vocabulary."""
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        if distinct.size and not 0 <= distinct[0] <= distinct[-1] < vocab_size:
            wrong = int(distinct[0] if distinct[0] < 0 else distinct[-1])
            raise InvalidRequest(
                f"Token id {wrong} of the prompt is outside of the vocabulary (0 to {vocab_size - 1}).",
                param="prompt",
            )
        self._size = int(distinct.size)
        self._ids = np.concatenate((distinct, np.zeros(64, dtype=np.int64)))
        self._counts = np.zeros(self._ids.size, dtype=np.float32)
        self._slots: dict[int, int] = {token: slot for slot, token in enumerate(distinct.tolist())}

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: self._size]

    def append(self, token_id: int) -> None:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._add(token_id)
        self._counts[slot] += 1

    def _add(self, token_id: int) -> int:
        if self._size == self._ids.size:
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        slot = self._size
        self._ids[slot] = token_id
        self._slots[token_id] = slot
        self._size += 1
        return slot


class SamplingState:
    """One choice: its parameters, its place in the random stream, and what its logit rules look back on.

    `params` must have passed `sampling_params.validate`. `seed` is any integer, taken modulo 2**64. After a
    preemption the same object simply continues: nothing in it depends on blocks or on batches.

    `forbidden` are the token ids that may not come yet because of `min_tokens`: every end-of-sequence token
    and every stop token, or None once enough tokens are out. They are masked even under `ignore_eos`, which
    only says that an end-of-sequence token does not finish the choice.
    """

    __slots__ = (
        "_vocab_size",
        "bias_ids",
        "bias_values",
        "edits",
        "forbidden",
        "greedy",
        "history",
        "index",
        "params",
        "plain",
        "position",
        "seed",
    )

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        index: int,
        prompt_token_ids: Sequence[int],
        eos_token_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        """Raises InvalidRequest if penalties look back on a prompt token outside of the vocabulary."""
        self.params = params
        self.seed = seed & SEED_MASK
        self.index = index
        self.position = 0  # tokens accepted so far; the counter of the random stream
        self.greedy = params.temperature == 0
        self._vocab_size = vocab_size
        self.bias_ids = np.array([token for token, _ in params.logit_bias], dtype=np.int64)
        self.bias_values = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self.history = _history(params, prompt_token_ids, vocab_size)
        self.forbidden = _forbidden(params, eos_token_ids, vocab_size)
        self._refresh()

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def append(self, token_id: int) -> None:
        """Records an accepted token; O(1). Raises ValueError for an id outside of the vocabulary."""
        if not 0 <= token_id < self._vocab_size:
            raise ValueError(f"token id {token_id} is outside of the vocabulary (0 to {self._vocab_size - 1})")
        self.position += 1
        if self.history is not None:
            self.history.append(token_id)
        if self.position == self.params.min_tokens:
            self.forbidden = None
            self._refresh()

    def _refresh(self) -> None:
        """`edits`: a rule changes logits. `plain`: the argmax of the model's logits is the whole answer."""
        self.edits = bool(self.bias_ids.size) or self.history is not None or self.forbidden is not None
        self.plain = self.greedy and not self.edits and self.params.logprobs is None


def _history(params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> TokenHistory | None:
    if params.repetition_penalty != 1:
        return TokenHistory(prompt, vocab_size=vocab_size)
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        return TokenHistory((), vocab_size=vocab_size)  # these two do not look at the prompt
    return None


def _forbidden(params: SamplingParams, eos_token_ids: frozenset[int], vocab_size: int) -> NDArray[np.int64] | None:
    if params.min_tokens <= 0:
        return None
    # A tokenizer may name end tokens that this model has no logit for; those cannot come anyway.
    ends = sorted(token for token in eos_token_ids.union(params.stop_token_ids) if 0 <= token < vocab_size)
    return np.array(ends, dtype=np.int64) if ends else None
