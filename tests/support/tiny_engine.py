"""The engine process with a random tiny model, one token a byte: `tiny_engine.py FIELD=NUMBER...` (of EngineConfig)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lamina.config import EngineConfig
from lamina.wiring.launch import Launch
from lamina.wiring.process import EngineProcess

__all__ = ["spawn_tiny"]

_TESTS = Path(__file__).parents[1]


def spawn_tiny(address: str, identity: bytes, store: Path, options: Sequence[str]) -> EngineProcess:
    config = EngineConfig(model=Path("tiny"), adapters=store)
    launch = Launch(address=address, identity=identity, parent=os.getpid(), config=config, heartbeat_s=0.1)
    environment = dict(os.environ) | {"PYTHONPATH": str(_TESTS), "OMP_NUM_THREADS": "1"}
    return EngineProcess(launch, [sys.executable, __file__, *options], environment)


def main(options: Sequence[str]) -> int:
    from fixtures.engines import TINY, tiny_core
    from lamina.wiring.engine import run_engine

    numbers = {name: int(number) for name, _, number in (option.partition("=") for option in options)}
    fields = TINY | {"vocab_size": 257, "eos_token_id": 256}
    launch = Launch.from_json(sys.stdin.buffer.read())
    return run_engine(lambda config: tiny_core(config.adapters, fields=fields, **numbers), launch)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
