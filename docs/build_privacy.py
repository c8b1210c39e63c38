"""Writes the table of what clients upload into docs/privacy.md: ``python docs/build_privacy.py``.

It comes from the command ``lightning-fedssl privacy``, with every configuration on the digits.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

from lightning_fedssl.cli import privacy
from lightning_fedssl.cli.lightning_cli import FederatedCLI, quiet
from lightning_fedssl.robust.aggregators import why_not_a_mean
from lightning_fedssl.trainer import FederatedTrainer

PAGE = Path(__file__).resolve().parent / "privacy.md"
CONFIGS = PAGE.parent.parent / "configs"
HEAD = ["| method | a client uploads, besides numbers of images and steps | needs only sums |", "|---|---|---|"]
MARKS = "<!-- table of build_privacy.py -->"


def rows() -> list[str]:
    """A row for each method, in alphabetical order."""
    found = {}
    for path in sorted(CONFIGS.glob("*_digits.yaml")):
        with quiet():
            cli = FederatedCLI(["--config", str(path), "--trainer.logger", "false"], run=False)
        trainer = cast(FederatedTrainer, cli.trainer)
        privacy.prepare(trainer, cli.model, cli.datamodule)
        if not cli.model.trains_clients:
            continue
        sent = [upload.what for upload in privacy.uploads(trainer) if not upload.what.startswith("in a deployment")]
        sums = "no" if why_not_a_mean(cli.model) else "yes"
        found[type(cli.model).__name__] = f"| {type(cli.model).__name__} | {'; '.join(sent)} | {sums} |"
    return [row for _, row in sorted(found.items())]


def main() -> None:
    """Replace the table in the page."""
    table = "\n".join([MARKS, "", *HEAD, *rows(), "", MARKS])
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(f"{MARKS}.*{MARKS}", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
