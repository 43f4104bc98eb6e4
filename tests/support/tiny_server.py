"""`lamina serve` with a random tiny model, a small pool, host memory and an embedded Valkey.

`tiny_server.py MODEL HOME`: tokenizer and templates are those of MODEL. `tests` has to be on the path. The store is
another one if LAMINA_KV_STORE_URL names it.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

__all__ = ["NUM_BLOCKS"]

NUM_BLOCKS = 64
_ENGINE = "--engine"


def engine() -> int:
    from fixtures.engines import TINY, tiny_core
    from lamina.wiring.engine import run_engine
    from lamina.wiring.launch import Launch

    fields = TINY | {"vocab_size": 49152, "max_position_embeddings": 8192}
    launch = Launch.from_json(sys.stdin.buffer.read())
    logging.basicConfig(level=launch.log_level)
    return run_engine(
        lambda config: tiny_core(
            config.adapters,
            fields=fields,
            num_blocks=NUM_BLOCKS,
            max_batch_tokens=128,
            max_running=6,
            max_waiting=64,
            served_name=config.name,
            host_kv_bytes=config.host_kv_bytes,
            kv_store_url=config.kv_store_url,
            kv_store_drain_s=config.kv_store_drain_s,
        ),
        launch,
    )


def server(model: str, home: str) -> None:
    from lamina.errors import LaminaError
    from lamina.wiring.logs import set_up_logging
    from lamina.wiring.serve import serve
    from lamina.wiring.settings import load_settings

    os.environ |= {"OMP_NUM_THREADS": "1", "LAMINA_KV_STORE_BYTES": "32MiB"}
    os.environ.setdefault("LAMINA_KV_STORE_URL", "embedded")
    set_up_logging("INFO")
    settings = load_settings(home=home, port="0", host_kv_bytes="200KiB")
    try:
        serve(
            settings,
            demo=False,
            find_model=lambda: Path(model),
            say=lambda text: print(text, flush=True),
            engine_command=[sys.executable, __file__, _ENGINE],
        )
    except LaminaError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    if sys.argv[1] == _ENGINE:
        sys.exit(engine())
    server(*sys.argv[1:])
