from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.gateway import Kit, build


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return build(tmp_path)
