"""What the KV benchmarks print: goals that are met or not, gates that close, and results beside the full run's."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

import harness
import kv
from harness import Goal, add_quick, finish, goal_table
from kv_copies import Bench, measure


def test_a_goal_knows_whether_it_is_reached():
    assert Goal.at_least("copies", 0.7, 0.7, "of memcpy", percent=True).reached
    assert not Goal.at_least("copies", 0.69, 0.7, "of memcpy", percent=True).reached
    assert Goal.at_most("p99", 1.3, 1.3, "x alone").reached
    assert not Goal.at_most("p99", 1.31, 1.3, "x alone").reached


def test_the_table_says_what_is_missed():
    lines = goal_table([Goal.at_most("p99", 2.0, 1.3, "x alone"), Goal.at_least("hits", 0.5, 0.4, "", percent=True)])
    assert [line.split("|")[-2].strip() for line in lines.splitlines()[2:]] == ["NO", "yes"]


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    add_quick(parser, rounds=2)
    return parser.parse_args(arguments)


def test_a_short_look_is_saved_beside_the_full_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    assert (options_of().rounds, options_of("--quick").rounds) == (9, 2)
    goals = [Goal.at_most("p99", 1.0, 1.3, "x alone")]
    for options in (options_of(), options_of("--quick")):
        finish("kv-thing", [{"a": 1}], ["a"], goals, options, {"model": "none"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv-thing-quick.json", "kv-thing.json"]
    found = json.loads((tmp_path / "kv-thing.json").read_text())
    assert [Goal(**goal) for goal in found["goals"]] == goals
    assert {"date", "cpu", "cores", "load_average", "torch", "python", "commit", "model"} <= found["environment"].keys()


@pytest.mark.parametrize("neighbours", [True, False])
def test_copies_come_back_bit_by_bit(neighbours: bool):
    bench = Bench(4096, 8 * 4096, torch.device("cpu"), neighbours=neighbours)
    bench.gate()
    assert {way: len(figures) for way, figures in measure(bench, rounds=2).items()} == {"spill": 3, "promote": 3}


def test_a_copy_that_is_wrong_closes_the_gate(monkeypatch: pytest.MonkeyPatch):
    bench = Bench(4096, 8 * 4096, torch.device("cpu"), neighbours=False)
    monkeypatch.setattr(bench, "promote", lambda: None)
    with pytest.raises(SystemExit, match="correctness gate"):
        bench.gate()


def test_every_part_is_a_script():
    assert all((Path(kv.__file__).parent / f"kv_{part}.py").is_file() for part in kv.PARTS)
