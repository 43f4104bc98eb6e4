"""What is printed when the server is ready can be pasted."""

from __future__ import annotations

import ast
import json
import shlex

from lamina.wiring.demo import DemoAccess
from lamina.wiring.greeting import greeting
from support.fake_engine import INFO

ACCESS = [DemoAccess("acme", "json-tagger", "lamina_live_a_b"), DemoAccess("globex", "pilot", "lamina_live_c_d")]
URL = "http://127.0.0.1:8000"


def test_the_curl_line_is_a_valid_request() -> None:
    """A shell splits it into one URL, two headers and a JSON body."""
    text = greeting(URL, INFO, ACCESS, seconds=3)
    curl = text[text.index("curl ") : text.index("\n\nWith the official")]
    words = shlex.split(curl.replace("\\\n", " "))
    assert words[2] == f"{URL}/v1/chat/completions"
    assert "Authorization: Bearer lamina_live_a_b" in words
    assert json.loads(words[-1])["model"] == "json-tagger"


def test_the_python_lines_are_a_program() -> None:
    """A here-document whose text parses, and whose end stands at the margin."""
    text = greeting(URL, INFO, ACCESS, seconds=3)
    program = text.split("<<'END'\n")[1].split("\nEND\n")[0]
    tree = ast.parse(program)
    literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert {f"{URL}/v1", "lamina_live_c_d", "pilot"} <= literals


def test_without_demo_it_says_how_to_begin() -> None:
    """No keys are printed; the commands to make one are."""
    text = greeting(URL, INFO, [], seconds=3)
    assert f"{URL}/v1" in text
    assert "lamina keys create --tenant" in text
    assert "Bearer" not in text
