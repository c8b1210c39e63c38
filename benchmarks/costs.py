"""What a client sends and receives in a round under each method: ``python benchmarks/costs.py``.

The numbers come from the ledgers of the digits configurations.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections import defaultdict
from pathlib import Path

import command_line
from command_line import RESULTS, ROOT

WITHOUT_WARM_UP = {"fedrgd_digits.yaml": ["--model.server_only_rounds=0"]}
"""Options of configurations whose first rounds train no client."""

Line = dict[str, str]
"""A line of ``ledger.csv`` by its column."""


def readable(size: float) -> str:
    """A number of bytes in decimal units, with at least two digits: ``5.9 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def main() -> None:
    """Run the configurations and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="instead of the configurations' own number")
    arguments = parser.parse_args()
    options = ["--trainer.callbacks+=CommunicationLedger"]
    if arguments.rounds:
        options.append(f"--trainer.max_rounds={arguments.rounds}")
    configs = [path.name for path in sorted((ROOT / "configs").glob("*_digits.yaml"))]
    ledgers = {config: ledger(config, options + WITHOUT_WARM_UP.get(config, [])) for config in configs}
    command_line.write(RESULTS / "costs.md", _report(ledgers, command_line.command(rounds=arguments.rounds)))


def ledger(config: str, options: list[str]) -> list[Line]:
    """The lines of the ledger of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command_line.fit(config, Path(folder), *options)
        (path,) = Path(folder).rglob("ledger.csv")
        with path.open(newline="") as file:
            return list(csv.DictReader(file))


def cell(lines: list[Line], direction: str) -> tuple[str, str]:
    """Bytes per client and round in one direction, and the kinds of tensors, ordered by falling size.

    The bytes of a kind are a mean over the pairs of a client and a round in which it was sent. If kinds are sent by
    different clients or in different rounds, the sum is that of a client that sends all of them.

    Args:
        lines: A ledger.
        direction: ``up`` or ``down``.
    """
    kinds: dict[str, float] = defaultdict(float)
    for line in lines:
        if line["direction"] == direction:
            kinds[line["kind"]] += int(line["total"]) / int(line["client_rounds"])
    parts = [f"{kind} {readable(size)}" for kind, size in sorted(kinds.items(), key=lambda item: -item[1])]
    return readable(sum(kinds.values())) if kinds else "nothing", ", ".join(parts)


def _report(ledgers: dict[str, list[Line]], command: str) -> list[str]:
    return [
        "# Communication between a client and the server",
        "",
        "Bytes per client and round in which it takes part, over a whole run of each configuration with its own seed,",
        "from the `CommunicationLedger`. A kind of tensor is averaged over the clients and rounds that sent it.",
        "",
        "| configuration | a client receives | | a client sends | | in all, all clients and rounds |",
        "|---|---|---|---|---|---|",
        *(_row(config, lines) for config, lines in ledgers.items()),
        "",
        f"`{command}` on {command_line.machine()}.",
    ]


def _row(config: str, lines: list[Line]) -> str:
    total = sum(int(line["total"]) for line in lines)
    return f"| {' | '.join((f'`{config}`', *cell(lines, 'down'), *cell(lines, 'up'), readable(total)))} |"


if __name__ == "__main__":
    main()
