"""`lamina serve` with the engine that does no arithmetic: `fake_server.py MODEL HOME [--demo] [ENGINE ARGUMENT...]`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lamina.errors import LaminaError
from lamina.wiring.logs import set_up_logging
from lamina.wiring.serve import serve
from lamina.wiring.settings import load_settings

FAKE_ENGINE = str(Path(__file__).with_name("fake_engine.py"))


def main(model: str, home: str, *arguments: str) -> None:
    set_up_logging("INFO")
    settings = load_settings(home=home, port=os.environ.get("LAMINA_PORT", "0"))
    engine = [sys.executable, FAKE_ENGINE, *(a for a in arguments if a != "--demo")]
    try:
        serve(
            settings,
            demo="--demo" in arguments,
            find_model=lambda: Path(model),
            say=lambda text: print(text, flush=True),
            engine_command=engine,
        )
    except LaminaError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main(*sys.argv[1:])
