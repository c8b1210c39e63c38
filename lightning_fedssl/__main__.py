"""``lightning-fedssl`` and ``python -m lightning_fedssl``."""

import sys

from lightning_fedssl.cli import main

if __name__ == "__main__":
    sys.exit(main())
