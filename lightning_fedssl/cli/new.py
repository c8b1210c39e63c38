"""The ``new`` command: writes a method of the user's own, with a configuration and tests, to start from."""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from lightning_fedssl.cli import listing
from lightning_fedssl.cli.parser import ScriptParser
from lightning_fedssl.storage.temporary import replace_file

USAGE = "lightning-fedssl new NAME [--folder FOLDER]"

DESCRIPTION = """\
Writes a method of your own to start from: a file with its class, a configuration and tests. It begins as FedAvg with
FixMatch at the clients; change what your paper changes. docs/adding_a_method.md explains what a method can override.

  lightning-fedssl new MyMethod
  lightning-fedssl fit --config my_method.yaml
  python -m pytest test_my_method.py
"""

_METHOD = '''\
"""{name}: one sentence on what is new. (Authors, "Title", venue, link.)

One round:

1. The server sends its model to the clients of the round.
2. Every client trains on its unlabelled images: a confident prediction for the weak view labels the strong view.
3. The server averages the clients' models, weighted by their numbers of images.
4. The server trains on its labelled images for ``server_epochs`` epochs.

Deviations from the paper, each with its reason: none yet.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from lightning_fedssl import FederatedAlgorithm
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.local_work import LocalWork, unlabeled_work


class {name}(FederatedAlgorithm):
    """One sentence on the method.

    Args:
        threshold: tau, the confidence from which a pseudo-label is trained on, from 0 to 1.
        server_epochs: Epochs of the server in a round.
        kwargs: Arguments of the base class: ``network``, ``optimizer``, ``client_epochs`` and others.
    """

    def __init__(self, threshold: float = 0.95, server_epochs: float = 1, **kwargs: Any) -> None:
        super().__init__(server_epochs=server_epochs, **kwargs)
        if not 0 <= threshold <= 1:
            raise ValueError(f"model.threshold is {{threshold}}: give a probability between 0 and 1")
        self.threshold = threshold

    def on_client_start(self, data: LocalData) -> LocalWork:
        """The work of a client in a round: batches of its unlabelled images."""
        return unlabeled_work(data, epochs=self.client_epochs)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of a client's batch; ``x_weak`` and ``x_strong`` are views of the same images ``(batch, ...)``."""
        confidence, labels = self(batch["x_weak"]).detach().softmax(dim=-1).max(dim=-1)
        mask = confidence >= self.threshold
        self.log("client/mask_rate", mask.double().mean(), batch_size=len(mask))
        return (mask * F.cross_entropy(self(batch["x_strong"]), labels, reduction="none")).mean()
'''

_CONFIGURATION = """\
# {name} on scikit-learn's handwritten digits (nothing to download): 50 labels at the server, 20 clients without labels.
# lightning-fedssl fit --config {module}.yaml
seed_everything: 0
trainer:
  max_rounds: 10
  clients_per_round: 5
  default_root_dir: runs/{module}
model:
  class_path: {module}.{name}
  init_args:
    threshold: 0.95
    client_epochs: 5
    server_epochs: 5
    network: {{class_path: CNN, init_args: {{norm: group}}}}
    optimizer: {{class_path: SGD, init_args: {{lr: 0.03, momentum: 0.9, nesterov: true}}}}
data: {{dataset: digits, num_clients: 20, num_labels: 50}}
"""

_TESTS = '''\
"""Tests of {name}; see docs/adding_a_method.md for further ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from lightning_fedssl import MLP, FederatedAlgorithm, FederatedDataModule, FederatedTrainer, FixMatch
from {module} import {name}
from torch import Tensor

OPTIONS = {{
    "network": partial(MLP, hidden=[8]),
    "optimizer": partial(torch.optim.SGD, lr=0.1),
    "client_epochs": 1,
    "server_epochs": 1,
}}


def trained(model: FederatedAlgorithm, folder: Path, clients_at_once: int = 1) -> dict[str, Tensor]:
    """The weights after two rounds with three clients, in 64 bits."""
    data = FederatedDataModule("digits", num_clients=3, num_labels=10, max_train_images=60, max_test_images=10)
    trainer = FederatedTrainer(
        max_rounds=2,
        clients_per_round=3,
        clients_at_once=clients_at_once,
        precision="64-true",
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    trainer.fit(model, data)
    return dict(model.server.parameters)


def test_stacked_clients_train_as_sequential_ones(tmp_path: Path) -> None:
    sequential = trained({name}(threshold=0.2, **OPTIONS), tmp_path / "sequential")
    stacked = trained({name}(threshold=0.2, **OPTIONS), tmp_path / "stacked", clients_at_once=3)
    torch.testing.assert_close(stacked, sequential, rtol=0, atol=1e-10)


def test_it_is_fixmatch_until_you_change_it(tmp_path: Path) -> None:
    """Replace this by a special case of your method: with what is new switched off, it equals a known method."""
    own = trained({name}(threshold=0.2, **OPTIONS), tmp_path / "own")
    known = trained(FixMatch(threshold=0.2, **OPTIONS), tmp_path / "known")
    torch.testing.assert_close(own, known, rtol=0, atol=1e-10)


def test_a_threshold_that_is_no_probability_is_refused() -> None:
    with pytest.raises(ValueError, match="model.threshold is 2: give a probability"):
        {name}(threshold=2, **OPTIONS)
'''


def main(arguments: Sequence[str]) -> int:
    """Run ``new``.

    Args:
        arguments: What follows the command's name.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: If the name is not usable.
        FileExistsError: If one of the files is there already.
        SystemExit: If an option is wrong, or after ``--help``.
    """
    parser = ScriptParser(
        prog="lightning-fedssl new", usage=USAGE, description=DESCRIPTION, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("name", metavar="NAME", help="The name of the class, such as MyMethod.")
    parser.add_argument("--folder", type=Path, default=Path(), help="Where to write; the current folder if left out.")
    options = parser.parse_args(list(arguments))
    for path in write_method(options.name, options.folder):
        sys.stdout.write(f"written: {path}\n")
    module = module_name(options.name)
    where = "" if options.folder == Path() else f"cd {shlex.quote(str(options.folder))} && "
    sys.stdout.write(f"next: {where}lightning-fedssl fit --config {module}.yaml\n")
    return 0


def module_name(name: str) -> str:
    """The module of a class: ``my_method`` of ``MyMethod``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def write_method(name: str, folder: Path) -> list[Path]:
    """Write a method, its configuration and its tests.

    Args:
        name: The name of the class.
        folder: Where to write; it is made.

    Returns:
        The files.

    Raises:
        ValueError: If the name is not usable.
        FileExistsError: If one of the files is there already.
    """
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name):
        raise ValueError(f"{name!r} is no name of a class: give letters and digits, the first a capital: MyMethod")
    module = module_name(name)
    if keyword.iskeyword(module) or keyword.iskeyword(name):
        raise ValueError(f"{name!r} would be the word {module!r} of Python's own language: give another name")
    texts = {f"{module}.py": _METHOD, f"{module}.yaml": _CONFIGURATION, f"test_{module}.py": _TESTS}
    files = {folder / file: text.format(name=name, module=module) for file, text in texts.items()}
    if existing := [str(path) for path in files if path.exists()]:
        raise FileExistsError(f"{existing[0]} is there already: give another name, or another --folder")
    if name in dict(listing.rows_of("methods")) or find_spec(module) is not None:
        raise ValueError(f"there is a method or a module {module} of this name already: give another name")
    for path, text in files.items():
        replace_file(path, partial(_write_text, text))
    return list(files)


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")
