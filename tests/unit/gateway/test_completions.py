"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.gateway import BASE, Kit, sse
from lamina.engine.testing import saying
from lamina.errors import EngineOverloaded


async def post(kit: Kit, **body: Any) -> Any:
    async with kit.client() as client:
        return await client.post("/v1/completions", json={"model": BASE, "prompt": "abc", "max_tokens": 4, **body})


def texts(response: Any) -> list[str]:
    return [choice["text"] for choice in response.json()["choices"]]


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [
        ("abc", ["abca"]),
        (["ab", "xyz"], ["abab", "xyzx"]),
        ([104, 105], ["hihi"]),
        ([[104, 105], [120]], ["hihi", "xxxx"]),
    ],
)
async def test_every_form_of_prompt(kit: Kit, prompt: Any, answers: list[str]) -> None:
    response = await post(kit, prompt=prompt)
    assert texts(response) == answers
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(len(answers)))


async def test_choices_of_several_prompts_are_numbered_by_prompt(kit: Kit) -> None:
    """And each prompt counts once in usage, however many choices share it."""
    response = await post(kit, prompt=["ab", "xyz"], n=2, best_of=2)
    assert texts(response) == ["abab", "baba", "xyzx", "yzxy"]
    assert response.json()["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 5,
        "completion_tokens": 16,
        "total_tokens": 21,
        "prompt_tokens_details": None,
    }


async def test_the_stream(kit: Kit) -> None:
    kit.engine.script = saying(*b"ok")
    response = await post(kit, prompt=["a", "b"], stream=True, stream_options={"include_usage": True})
    *chunks, last, done = sse(response.text)
    assert done == "[DONE]"
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [(each["text"], each["finish_reason"]) for each in mine] == [("o", None), ("k", None), ("", "stop")]
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    assert last["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("prompt", [["ab", "xy"], [[97, 98], [120, 121]]], ids=["text", "tokens"])
@pytest.mark.parametrize("stream", [True, False])
async def test_echo_puts_the_prompt_in_front(kit: Kit, stream: bool, prompt: Any) -> None:
    response = await post(kit, prompt=prompt, echo=True, stream=stream)
    if stream:
        answers = ["", ""]
        for chunk in sse(response.text)[:-1]:
            answers[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    else:
        answers = texts(response)
    assert answers == ["ababab", "xyxyxy"]


async def test_logprobs(kit: Kit) -> None:
    (choice,) = (await post(kit, prompt="é", max_tokens=2, logprobs=2)).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [
            {"bytes:\\xc3": -0.5, "bytes:\\xc4": -1.5},
            {"bytes:\\xa9": -0.5, "bytes:\\xaa": -1.5},
        ],
        "text_offset": [0, 0],
    }


async def test_streamed_logprobs_have_continuous_offsets(kit: Kit) -> None:
    chunks = sse((await post(kit, logprobs=0, stream=True)).text)[:-1]
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks[:-1]]
    assert offsets == [[0], [1], [2], [3]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"best_of": 3}, "unsupported_parameter", "best_of"),
        ({"best_of": 3, "n": 2}, "unsupported_parameter", "best_of"),
        ({"echo": True, "logprobs": 1}, "unsupported_parameter", "echo"),
        ({"suffix": "tail"}, "unsupported_parameter", "suffix"),
        ({"prompt": ""}, "invalid_request", "prompt"),
        ({"prompt": []}, "invalid_request", "prompt"),
        ({"prompt": [[]]}, "invalid_request", "prompt"),
        ({"prompt": ["ok", ""]}, "invalid_request", "prompt"),
        ({"prompt": [300]}, "invalid_request", "prompt"),
        ({"prompt": [-1]}, "invalid_request", "prompt"),
        ({"prompt": ["a", 1]}, "invalid_request", "prompt"),
        ({"prompt": ["a"] * 129}, "invalid_request", "prompt"),
        ({"prompt": None}, "invalid_request", "prompt"),
        ({"prompt": True}, "invalid_request", "prompt"),
        ({"logprobs": 21}, "invalid_request", "logprobs"),
        ({"logprobs": True}, "invalid_request", "logprobs"),
    ],
)
async def test_refusals(kit: Kit, body: dict[str, Any], code: str, param: str) -> None:
    response = await post(kit, **body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["param"]) == (code, param)
    assert kit.engine.submitted == []


async def test_one_prompt_refused_refuses_the_call(kit: Kit) -> None:
    """And the other prompts don't go on running."""
    kit.engine.refusal = EngineOverloaded()
    response = await post(kit, prompt=["a", "b", "c"])
    assert response.status_code == 503
    assert kit.engine.running == ()


async def test_empty_suffix_is_neutral(kit: Kit) -> None:
    assert (await post(kit, suffix="")).status_code == 200
