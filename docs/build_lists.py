"""Writes lightning_fedssl/cli/lists.json: what ``lightning-fedssl methods`` and its like list, a line about each.

python docs/build_lists.py
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.cli import listing
from lightning_fedssl.cli.config_files import CONFIGS, package_files
from lightning_fedssl.cli.public import PARTS
from lightning_fedssl.data import DataSource, Partition
from lightning_fedssl.data.datasets import IMAGE_FOLDER, SPECS
from lightning_fedssl.system import Availability

SENTENCE = re.compile(r"(?<!\bFig)(?<!\bFigs)(?<!\bEq)(?<!\bApp)(?<!\bal)\. |: ")
"""The end of the first sentence of a comment; the full stop of an abbreviation does not count."""


def lists() -> str:
    """Names by the command that lists them, each with a line about it, as JSON."""
    datasets = {
        name: f"{spec.num_classes} classes, shape {' x '.join(map(str, spec.in_shape))}" for name, spec in SPECS.items()
    }
    datasets[IMAGE_FOLDER] = "a folder of your own: root/train/<class>/ and root/test/<class>/"
    found = {
        "methods": derived_from(FederatedAlgorithm),
        "datasets": datasets | derived_from(DataSource),
        "partitions": derived_from(Partition),
        "availability": derived_from(Availability),
        "configs": comments(CONFIGS),
        "suites": comments(CONFIGS / "suites"),
    }
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def derived_from(base: type) -> dict[str, str]:
    """The public classes that derive from a base class, each with the first line of its docstring."""
    public = [getattr(part, name) for part in PARTS for name in part.__all__]
    return {
        c.__name__: (c.__doc__ or "").partition("\n")[0].replace("``", "")
        for c in public
        if isinstance(c, type) and issubclass(c, base) and c is not base and not inspect.isabstract(c)
    }


def comments(folder: Path) -> dict[str, str]:
    """Files of the package with the comment at the top of each, up to its first full stop or colon."""
    found = {}
    for name, path in package_files(folder).items():
        if not name.startswith("suites/"):
            comment = re.match(r"(?:#.*\n)*", path.read_text(encoding="utf-8"))
            words = comment[0].replace("#", " ").split() if comment else []
            found[name] = SENTENCE.split(" ".join(words))[0].rstrip(".")
    return found


if __name__ == "__main__":
    listing.FILE.write_text(lists(), encoding="utf-8")
