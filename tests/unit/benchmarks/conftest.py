"""The benchmarks are scripts: their folder is on the path when they run, so it is here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
