"""Text to token ids and back, and conversations to text, without torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from lamina.errors import InvalidRequest, UnsupportedModel
from lamina.models.template import ChatTemplate
from lamina.models.token_spelling import spelling_of
from lamina.models.tokenizer_files import TokenizerFiles, read_tokenizer_files

__all__ = ["Tokenizer"]

_LONG_TEXT = 4096  # characters; from here on encode as a batch, which lets go of the interpreter lock


class Tokenizer:
    """A model's tokenizer and chat template. Thread-safe: share one per model.

    Control tokens in text: `encode` recognises them by default, because a rendered chat consists of them.
    So a user who writes `<|im_end|>` in a message ends that message as far as the model can tell, here as
    in other servers: a conversation's text is the tenant's to guard. Pass `parse_special=False` for text
    in which nothing may act as a control token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
        """`backend` is taken over: its truncation and padding are switched off."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._spelling = spelling_of(json.loads(backend.to_str()).get("decoder"))
        self._spelled: dict[int, bytes] = {}
        self._templates = {name: ChatTemplate(source, files.special_tokens) for name, source in files.templates.items()}
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_id: int | None = self._id_of(files.special_tokens.get("bos_token"))
        self.eos_id: int | None = self._id_of(files.special_tokens.get("eos_token"))
        self.eos_ids: frozenset[int] = files.eos_ids | ({self.eos_id} if self.eos_id is not None else set())

    @classmethod
    def from_folder(cls, path: Path) -> Tokenizer:
        """Reads a Hugging Face folder: tokenizer.json, and what is there of tokenizer_config.json,
        special_tokens_map.json, chat_template.jinja and generation_config.json.

        Raises UnsupportedModel if there is no tokenizer.json or one of them cannot be used.
        """
        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            raise UnsupportedModel(
                f"{path} has no tokenizer.json. Save the model's fast tokenizer there (in transformers: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...))."
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for every defect
            raise UnsupportedModel(f"{file} is no usable tokenizer: {error}.") from error
        return cls(backend, read_tokenizer_files(Path(path)))

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens`: with what the model expects around a text (a begin-of-sequence token, for many).
        `parse_special`: control tokens written in `text` become control tokens; else they are plain text.
        Raises InvalidRequest if `text` is not valid Unicode.
        """
        backend = self._backend if parse_special else self._literal
        try:
            if len(text) > _LONG_TEXT:
                return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # the library's word for text that has no UTF-8 form
            raise InvalidRequest(
                "The text holds half of a surrogate pair (U+D800 to U+DFFF); send valid Unicode."
            ) from None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no valid UTF-8 become U+FFFD, unknown ids nothing.

        Raises InvalidRequest for a negative id.
        """
        try:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except OverflowError:
            raise InvalidRequest(
                f"Token ids go from 0 to {self.vocab_size - 1}; correct those that do not.", param="tokens"
            ) from None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text: perhaps part of a character, nothing for an unknown id."""
        spelled = self._spelled.get(token_id)
        if spelled is None:
            token = self._backend.id_to_token(token_id) if token_id >= 0 else None
            spelled = self._spelled[token_id] = b"" if token is None else self._spelling(token)
        return spelled

    def token_text(self, token_id: int) -> str:
        """The token for people to read; U+FFFD stands for parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The conversation in the model's own format; see `ChatTemplate.render`.

        Encode it with `add_special_tokens=False`: the template writes them. Raises InvalidRequest if the
        model has no template or its template refuses the conversation.
        """
        return self._template_for(tools).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """`render_chat`, then `encode` with control tokens recognised. Raises InvalidRequest."""
        text = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The backend that takes control tokens for plain text. The switch is the backend's, not the call's, so
        threads that want it differently need two.
        """
        literal = tokenizers.Tokenizer.from_str(self._backend.to_str())
        literal.encode_special_tokens = True
        return literal

    def _template_for(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(
                "This model has no chat template, so it cannot chat; use /v1/completions.", param="messages"
            )
        return self._templates[name]

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)
