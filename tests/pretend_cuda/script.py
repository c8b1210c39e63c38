"""Runs a script on the pretend CUDA device: ``python -m tests.pretend_cuda.script SCRIPT [ARGUMENT ...]``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tests.pretend_cuda.device import pretend_cuda


def main() -> None:
    """Run the script as ``python SCRIPT`` does."""
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    with pretend_cuda():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
