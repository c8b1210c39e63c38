from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lightning_fedssl import CNN, MLP, Experiment, SemiFL
from lightning_fedssl.cli import main
from lightning_fedssl.functional.optimizers import half_momentum
from tests.cli.helpers import write


def test_a_configuration_is_trained_from_python_as_from_the_command_line(folder: Path) -> None:
    changed = {"trainer.max_rounds": 1, "model": {"init_args": {"threshold": 0.6}}}
    trainer, model, data = Experiment.from_config("run.yaml", {"trainer.max_rounds": 7}, {}, changed)
    assert (trainer.max_rounds, vars(model)["threshold"], data.num_clients) == (1, 0.6, 5)
    trainer.fit(model, data)
    assert main(["fit", "--config", "run.yaml", "--trainer.max_rounds", "1", "--model.threshold", "0.6"]) == 0
    first, second = (
        torch.load(f"lightning_logs/version_{n}/checkpoints/last.ckpt", weights_only=True)["state_dict"] for n in (0, 1)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert yaml.safe_load(Path("lightning_logs/version_0/config.yaml").read_text())["trainer"]["max_rounds"] == 1
    for number in (0, 1):  # jsonargparse gives a default function as its name
        loaded = SemiFL.load_from_checkpoint(f"lightning_logs/version_{number}/checkpoints/last.ckpt")
        assert loaded.aggregation_optimizer is half_momentum


def test_keys_of_a_mapping_are_applied_in_their_order(folder: Path) -> None:
    """As on the command line: the class first, then its arguments."""
    _, model, data = Experiment.from_config(
        "run.yaml",
        {"model": "Supervised", "model.server_epochs": 3, "data.partition": "Dirichlet", "data.partition.alpha": 0.25},
    )
    assert (type(model).__name__, model.hparams["server_epochs"]) == ("Supervised", 3)
    assert (type(data.partition).__name__, vars(data.partition)["alpha"]) == ("Dirichlet", 0.25)
    model = Experiment.from_config("run.yaml", {"model.optimizer": "Adam", "model.optimizer.lr": 0.5}).model
    optimizer = model.optimizer(iter(torch.nn.Linear(1, 1).parameters()))
    assert (type(optimizer).__name__, optimizer.param_groups[0]["lr"]) == ("Adam", 0.5)


def test_a_mapping_may_hold_paths_classes_and_numbers_of_numpy(folder: Path) -> None:
    values = {"trainer.default_root_dir": folder, "data": {"num_clients": np.int64(5)}, "model.network": CNN}
    trainer, model, data = Experiment.from_config("run.yaml", values, {"model.threshold": np.linspace(0.5, 1, 3)[1]})
    assert (trainer.default_root_dir, data.num_clients) == (str(folder), 5)
    assert vars(model)["threshold"] == 0.75
    model.configure_model()
    assert isinstance(model.network, CNN)


@pytest.mark.parametrize(
    ("configurations", "words"),
    [
        (["nowhere.yaml"], "nowhere.yaml: there is no such file; lightning-fedssl configs"),
        (["run.yaml", {"trainer.max_round": 3}], "did you mean trainer.max_rounds?"),
        ([Path("run.yaml"), {"model.threshold": 3}], "model.threshold is 3.0: give a number from 0 to 1"),
        (["run.yaml", {"model.network": MLP()}], "a configuration cannot hold an object of type MLP"),
    ],
)
def test_a_wrong_configuration_is_a_value_error(folder: Path, configurations: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Experiment.from_config(*configurations)


def test_a_message_names_its_file_once(folder: Path) -> None:
    write("wrong.yaml", "model: {class_path: FixMatch, init_args: {thresold: 1}}")
    with pytest.raises(ValueError, match=r"did you mean threshold\?") as error:
        Experiment.from_config("run.yaml", "wrong.yaml")
    assert str(error.value).count("wrong.yaml") == 1
