"""The tokenizer inside a GGUF file, as a `tokenizers` object and a tokenizer_config.json.

GGUF names the rule that cuts text before BPE (`tokenizer.ggml.pre`) but does not spell it out. A rule that is
not known here is refused: with a wrong one, text still encodes and decodes, only into token ids that the
model was never trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lamina.errors import UnsupportedModel

__all__ = ["build_tokenizer", "tokenizer_config"]

_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF's metadata `fields` describe; UnsupportedModel if its kind is unknown."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(fields)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    return tokenizer


def _pre_tokenizer(fields: Mapping[str, Any]) -> pre_tokenizers.PreTokenizer:
    model, rule = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if (model, rule) != ("gpt2", "smollm"):
        raise UnsupportedModel(
            f"The GGUF's tokenizer is {model!r} with rule {rule!r}; only 'gpt2' with 'smollm' converts. "
            "Use the model's original Hugging Face folder instead."
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The content of tokenizer_config.json: special tokens by role, context length, chat template."""
    tokens = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(fields["llama.context_length"]),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
    }
    for role, key in _ROLES.items():
        if (token_id := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[role] = tokens[token_id]
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
