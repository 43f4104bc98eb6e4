"""All figures of the KV tiers in one table: each part in a process of its own, one after the other.

    python benchmarks/kv.py                        # fifteen to twenty minutes on two idle cores
    python benchmarks/kv.py --quick                # a short look, six to ten
    python benchmarks/kv.py --parts replay copies

Exits with 1 if a goal is missed, and at once with the part's own message if a correctness gate closes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from harness import RESULTS, Goal, goal_table

PARTS = ("copies", "bookkeeping", "redis", "store_quotas", "replay", "tiers", "flood")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    goals = [goal for part in options.parts for goal in _run(part, quick=options.quick)]
    print(f"\n{goal_table(goals)}", flush=True)
    sys.exit(0 if all(goal.reached for goal in goals) else 1)


def _run(part: str, *, quick: bool) -> list[Goal]:
    started = time.monotonic()
    print(f"\nkv_{part} ...", file=sys.stderr, flush=True)
    command = [sys.executable, str(Path(__file__).parent / f"kv_{part}.py"), *(["--quick"] if quick else [])]
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    print(f"kv_{part}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    found = json.loads((RESULTS / f"kv-{part.replace('_', '-')}{'-quick' if quick else ''}.json").read_text())
    return [Goal(**goal) for goal in found["goals"]]


if __name__ == "__main__":
    main()
