"""What a newcomer does: `lamina serve --demo`, then paste what it prints. The real engine, the real adapters."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from fixtures.gateway import zipped
from fixtures.oracle import Oracle
from fixtures.peft_adapters import write_peft_adapter
from lamina.models.tokenizer import Tokenizer

pytestmark = pytest.mark.model

BASE = "smollm2-135m-instruct"


@dataclass
class Demo:
    process: subprocess.Popen[str]
    url: str
    greeting: str

    def key(self, tenant: str) -> str:
        match = re.search(rf"tenant {tenant} .*key (\S+)", self.greeting)
        assert match is not None
        return match[1]

    def client(self, tenant: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key(tenant), max_retries=0)


@pytest.fixture(scope="module")
def demo(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    home = tmp_path_factory.mktemp("home")
    command = [str(Path(sys.executable).with_name("lamina")), "serve", "--demo", "--port", "0", "--home", str(home)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        greeting = ""
        for line in process.stdout:
            greeting += line
            if line.startswith("Ctrl-C stops"):
                break
        match = re.search(r"is ready after .* s: (http://\S+)/v1", greeting)
        assert match is not None, greeting
        yield Demo(process, match[1], greeting)
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert not [child for child in children if child.is_running()]
    finally:
        process.kill()
        process.communicate()


def ask(client: openai.OpenAI, model: str, text: str = "The ferry to Oslo leaves at nine.") -> str:
    """A streamed greedy answer."""
    messages = [{"role": "user", "content": text}]
    chunks = client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the printed line needs curl")
def test_the_printed_curl_line_works(demo: Demo) -> None:
    """Pasted into a shell it prints a completion of the tenant's adapter."""
    start = demo.greeting.index("curl ")
    line = demo.greeting[start : demo.greeting.index("\n\n", start)]
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert answer["model"] == "json-tagger"
    assert answer["choices"][0]["message"]["content"]


def test_the_printed_python_lines_work(demo: Demo) -> None:
    """Pasted into a shell they stream an answer of the other tenant's adapter."""
    start = demo.greeting.index("With the official")
    program = demo.greeting[start : demo.greeting.index("\nEND\n") + 5].split("\n\n", 1)[1]
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert done.stdout.strip()


def test_base_and_both_adapters_answer_at_once_and_differ(demo: Demo) -> None:
    """Concurrent streams of two tenants over one base: each gets what it gets alone."""
    acme, globex = demo.client("acme"), demo.client("globex")
    jobs = [(acme, BASE), (acme, "json-tagger"), (globex, BASE), (globex, "harbour-pilot")] * 2
    alone = [ask(*job) for job in jobs[:4]]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(lambda job: ask(*job), jobs))
    assert together == alone * 2
    assert len({alone[0], alone[1], alone[3]}) == 3
    assert alone[0] == alone[2]


def test_tenants_see_their_own_adapters_only(demo: Demo) -> None:
    """The other's adapter is not listed and is 404."""
    acme, globex = demo.client("acme"), demo.client("globex")
    assert {model.id for model in acme.models.list()} == {BASE, "json-tagger"}
    assert {model.id for model in globex.models.list()} == {BASE, "harbour-pilot"}
    with pytest.raises(openai.NotFoundError):
        ask(acme, "harbour-pilot")


def test_an_uploaded_dora_adapter_answers_as_in_peft(demo: Demo, demo_model: Path, tmp_path: Path) -> None:
    """Through the Files API into the running engine, which measures it against the model's own weights."""
    targets = ["q_proj", "o_proj", "up_proj", "down_proj"]
    folder = write_peft_adapter(
        demo_model, tmp_path / "dora", seed=5, r=4, lora_alpha=8, use_dora=True, target_modules=targets
    )
    files = {name: (folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    client, tokenizer = demo.client("acme"), Tokenizer.from_folder(demo_model)
    purpose: Any = "adapter"
    file = client.files.create(file=("dora.zip", zipped(files)), purpose=purpose)
    prompt = tokenizer.encode("The ferry to Oslo leaves at nine.")
    answer = client.completions.create(
        model="dora", prompt=prompt, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    client.files.delete(file.id)
    expected = Oracle(demo_model, {"dora": folder}).greedy(prompt, 12, "dora")
    assert answer.choices[0].text == tokenizer.decode(expected.tokens)
