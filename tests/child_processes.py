"""What processes that tests start find: this checkout and what lies in tests/, then whatever this process was told."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def environment(**variables: str) -> dict[str, str]:
    """This process's, with the checkout's folders in front of PYTHONPATH, and `variables`."""
    folders = [str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | variables
