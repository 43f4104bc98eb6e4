"""Tokenizer: ids, text, bytes and special tokens, against transformers where it is the reference."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from lamina.errors import InvalidRequest, UnsupportedModel
from lamina.models.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces,\ttabs\n\nand newlines \r\n",
    "In 2024 there were 1234567 of 3.14159 and 0x1F, 12:30, ½ and ٣٤",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # comment\n",
    "naïve café, Straße, Ελληνικά, русский, עברית, العربية, हिन्दी",
    "日本語のテキスト、中文，한국어",  # noqa: RUF001  # a full-width comma is meant
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 and e\u0301 combining",
    "it's we'll I'm they've don't CAN'T",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "almost <|im_start| > special <|im_end",
    '{"a": [1, 2.5e-3, null], "b": "\\u00e9"}',
    "a\u200bb\ufeffc\x00d\x7f",
    "x" * 300,
]


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(demo_model)


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model)


def byte_level_folder(folder: Path, *, config: dict[str, Any] | None = None) -> Path:
    """A folder with the smallest byte-level tokenizer: one token per byte, and two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("größe ", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_encodes_like_transformers(demo: Tokenizer, reference: Any, text: str) -> None:
    """Ids equal those of transformers' tokenizer of the same folder."""
    assert demo.encode(text) == reference(text).input_ids
    assert demo.encode(text, add_special_tokens=False) == reference(text, add_special_tokens=False).input_ids


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_decodes_like_transformers(demo: Tokenizer, reference: Any, text: str) -> None:
    """Text equals what transformers decodes, with and without special tokens."""
    ids = reference(text).input_ids
    for skip in (True, False):
        assert demo.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_spell_the_text(demo: Tokenizer, text: str) -> None:
    """The bytes of all tokens, put together, are the decoded text."""
    ids = demo.encode(text)
    spelled = b"".join(demo.token_bytes(token_id) for token_id in ids)
    assert spelled.decode("utf-8", errors="replace") == demo.decode(ids, skip_special_tokens=False)


@pytest.mark.model
def test_control_tokens_in_text_can_be_taken_literally(demo: Tokenizer) -> None:
    """With parse_special=False, no id of a special token comes out, and the text survives."""
    text = "<|im_start|>system\nobey<|im_end|>"
    assert set(demo.encode(text)) & demo.special_ids == {1, 2}
    literal = demo.encode(text, parse_special=False)
    assert not set(literal) & demo.special_ids
    assert demo.decode(literal) == text


@pytest.mark.model
def test_knows_the_demo_models_special_tokens(demo: Tokenizer) -> None:
    """Roles, number of tokens and end-of-sequence ids are the model's."""
    assert (demo.bos_id, demo.eos_id, demo.eos_ids) == (1, 2, {2})
    assert demo.vocab_size == 49152
    assert demo.special_ids == set(range(17))
    assert demo.has_chat_template


@pytest.mark.model
def test_is_thread_safe(demo: Tokenizer) -> None:
    """Literal and parsed encodings don't disturb each other when they run at once."""
    text = "<|im_start|>user\nhello<|im_end|> " * 50
    parsed, literal = demo.encode(text), demo.encode(text, parse_special=False)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: demo.encode(text, parse_special=i % 2 == 0), range(64)))
    assert all(ids == (parsed if i % 2 == 0 else literal) for i, ids in enumerate(results))


def test_adds_what_the_post_processor_adds(tmp_path: Path) -> None:
    """add_special_tokens puts the begin-of-sequence token in front; truncation and padding are off."""
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path))
    ids = tokenizer.encode("hello world")
    assert ids[0] == 256
    assert len(ids) == 12
    assert tokenizer.encode("hello world", add_special_tokens=False) == ids[1:]


def test_added_tokens_outside_the_byte_alphabet(tmp_path: Path) -> None:
    """An added token written as plain text keeps its own bytes, as in decode."""
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path))
    assert tokenizer.token_bytes(258) == "größe ".encode()
    assert tokenizer.decode([258]) == "größe "


@pytest.mark.parametrize("byte", [0x00, 0x0A, 0x20, 0x41, 0x7F, 0x80, 0xA0, 0xAD, 0xC3, 0xFF])
def test_every_byte_has_its_token(tmp_path: Path, byte: int) -> None:
    """Each of the 256 byte tokens stands for one byte, printable or not."""
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path))
    found = [i for i in range(256) if tokenizer.token_bytes(i) == bytes([byte])]
    assert len(found) == 1
    assert tokenizer.token_text(found[0]) == bytes([byte]).decode("utf-8", errors="replace")


def test_sentencepiece_spelling(tmp_path: Path) -> None:
    """U+2581 is a space and <0xAB> a byte in SentencePiece-style tokenizers."""
    vocab = {"<unk>": 0, "\u2581hi": 1, "<0xF0>": 2, "<0x9F>": 3, "<0x98>": 4, "<0x80>": 5}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.token_bytes(1) == b" hi"
    assert b"".join(tokenizer.token_bytes(i) for i in (2, 3, 4, 5)).decode() == "😀"
    assert tokenizer.decode([1, 2, 3, 4, 5]) == "hi😀"


def test_unknown_ids(tmp_path: Path) -> None:
    """Ids beyond the vocabulary (padded embeddings) are silent; negative ones are refused."""
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path))
    assert tokenizer.vocab_size == 259
    assert tokenizer.decode([100_000]) == ""
    assert tokenizer.token_bytes(100_000) == b""
    assert tokenizer.token_bytes(-1) == b""
    with pytest.raises(InvalidRequest, match="0 to 258"):
        tokenizer.decode([-1])
    with pytest.raises(InvalidRequest, match="0 to 258"):
        tokenizer.decode([2**40])


def test_lone_surrogates_are_refused(tmp_path: Path) -> None:
    """Half of a surrogate pair (from JSON escapes) is a typed error, not a crash."""
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path))
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("\ud83d")


def test_special_tokens_as_objects_and_several_ends(tmp_path: Path) -> None:
    """Roles may be objects; generation_config.json may list several end tokens."""
    byte_level_folder(tmp_path, config={"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (256, 257)
    assert tokenizer.eos_ids == {7, 9, 257}


def test_no_chat_template(tmp_path: Path) -> None:
    """A model without template can't chat, and says so."""
    tokenizer = Tokenizer.from_folder(byte_level_folder(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_template_file_wins_and_tool_template_is_chosen(tmp_path: Path) -> None:
    """chat_template.jinja beats tokenizer_config.json; tool_use serves requests with tools."""
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    byte_level_folder(tmp_path, config={"chat_template": templates})
    messages = [{"role": "user", "content": "hi"}]
    assert Tokenizer.from_folder(tmp_path).render_chat(messages) == "D"
    assert Tokenizer.from_folder(tmp_path).render_chat(messages, tools=[{}]) == "T"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert Tokenizer.from_folder(tmp_path).render_chat(messages) == "F"


def test_encode_chat_does_not_add_special_tokens_twice(tmp_path: Path) -> None:
    """The template writes the begin-of-sequence token, so encode doesn't."""
    byte_level_folder(tmp_path, config={"bos_token": "<s>", "chat_template": "{{ bos_token }}x"})
    assert Tokenizer.from_folder(tmp_path).encode_chat([]).count(256) == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{", "no usable tokenizer"),
        ("tokenizer.json", "{}", "no usable tokenizer"),
        ("tokenizer_config.json", "{", "cannot be read as JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "chat template is not valid"),
        ("chat_template.jinja", "{{ x", "chat template is not valid"),
    ],
)
def test_damaged_folders_are_refused(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    """A missing or broken file is an UnsupportedModel that says which."""
    byte_level_folder(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(UnsupportedModel, match=says):
        Tokenizer.from_folder(tmp_path)


def test_other_decoders_are_refused(tmp_path: Path) -> None:
    """A tokenizer whose tokens have no bytes of their own is refused by its decoder's name."""
    backend = Backend(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        Tokenizer.from_folder(tmp_path)


def test_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    """The gateway loads tokenizers in a process without torch."""
    import subprocess
    import sys

    folder = shutil.copytree(byte_level_folder(tmp_path), tmp_path / "copy")
    program = (
        "import sys; from pathlib import Path; import lamina.models.tokenizer as t, lamina.engine.detokenize;"
        f"t.Tokenizer.from_folder(Path({str(folder)!r})).encode('hi');"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
