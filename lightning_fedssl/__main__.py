"""``lightning-fedssl`` and ``python -m lightning_fedssl``."""

from __future__ import annotations

import sys

_BROKEN_PAIR = "operator torchvision::nms does not exist"


def main() -> int:
    """Run the command line; returns the exit code.

    Lightning imports torchvision where it is installed, so a torchvision built for another torch would end every command
    in a traceback of neither's making.
    """
    try:
        from lightning_fedssl.cli import main as run
    except RuntimeError as error:
        if _BROKEN_PAIR not in str(error):
            raise
        sys.stderr.write(
            "error: the installed torch and torchvision do not belong together; install a matched pair, "
            "for example the versions in constraints.txt: pip install --force-reinstall torch torchvision\n"
        )
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
