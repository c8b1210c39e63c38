"""Constructors as type checkers and editors see them: every argument of a method, also those that it passes on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch import LightningModule

from lightning_fedssl import CNN, FixMatch
from lightning_fedssl.storage.hyperparameters import hyperparameters

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """\
from lightning_fedssl import CNN, UDA, FedAvg, FederatedTrainer, FixMatch

method: FedAvg = FixMatch(network=CNN, threshold=0.9, client_epochs=5, prox_mu=0.1)
FixMatch(network=CNN, treshold=0.9)
FixMatch(threshold=0.9)
UDA(network=CNN, threshold=0.9, prox_mu="0.1")
FederatedTrainer(max_round=3)
"""
FOUND = [
    (4, 'Unexpected keyword argument "treshold" for "FixMatch"; did you mean "threshold"?'),
    (5, 'Missing named argument "network" for "FixMatch"'),
    (6, 'Argument "prox_mu" to "UDA" has incompatible type "str"; expected "float"'),
    (7, 'Unexpected keyword argument "max_round" for "FederatedTrainer"; did you mean "max_rounds"?'),
]


def test_defaults_that_would_have_no_effect_are_refused() -> None:
    undecorated = type("Mine", (FixMatch,), {"threshold": 0.5})
    untyped = hyperparameters(type("Mine", (FixMatch,), {"threshold": 0.5}))
    for method in (undecorated, untyped, type("Mine", (untyped,), {})):
        with pytest.raises(TypeError, match=r"Mine\.threshold does not change the default of threshold"):
            method(network=CNN)
    with pytest.raises(TypeError, match=r"Mine\.freeze does not change the default of freeze"):
        type("Mine", (FixMatch,), {"freeze": ("*",)})(network=CNN)
    for wrong in ({"__init__": print}, {"__annotations__": {"bounds": list}, "bounds": []}):
        with pytest.raises(TypeError, match=r"Mine has an __init__|Mine\.bounds: its objects would share"):
            hyperparameters(type("Mine", (FixMatch,), wrong))


def test_a_module_that_makes_a_method_lends_it_no_arguments() -> None:
    class Wrapper(LightningModule):
        def __init__(self, lr: float = 0.5, threshold: float = 0.1) -> None:
            super().__init__()
            self.method = FixMatch(network=CNN, threshold=0.9)

    found = Wrapper().method.hparams
    assert "lr" not in found
    assert found["threshold"] == 0.9


def test_mypy_refuses_wrong_arguments(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", str(tmp_path / "program.py")]  # in the checkout, for its cache
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert [(int(n), m) for n, m in re.findall(r"program\.py:(\d+): error: (.*?)  \[", found)] == FOUND, found
