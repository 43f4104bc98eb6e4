"""The exact bytes that each token stands for, whatever way its tokenizer writes them down.

Two spellings cover every supported model. *Byte-level* BPE (GPT-2's, Llama 3's, Qwen's) writes each byte
as one printable character. *SentencePiece* style (Llama 2's, Mistral's first, Gemma's) writes a space as
U+2581 and a byte without a token of its own as `<0xAB>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lamina.errors import UnsupportedModel

__all__ = ["Spelling", "spelling_of"]

Spelling = Callable[[str], bytes]

_SENTENCEPIECE_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def spelling_of(decoder: Mapping[str, Any] | None) -> Spelling:
    """From the `decoder` part of a tokenizer.json to the function from a token's text to its bytes.

    Raises UnsupportedModel for a decoder of another kind: its tokens have no bytes of their own.
    """
    kinds = {part["type"] for part in _parts(decoder)}
    if "ByteLevel" in kinds:
        return _byte_level
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _sentencepiece
    raise UnsupportedModel(
        f"This tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is not supported; byte-level and "
        "SentencePiece-style (ByteFallback, Metaspace) ones are."
    )


def _parts(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    yield decoder
    for part in decoder.get("decoders", ()):
        yield from _parts(part)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's bijection: printable Latin-1 bytes stand for themselves, the others, in order, for U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:  # an added token, written as plain text
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_SENTENCEPIECE_SPACE, " ").encode()
