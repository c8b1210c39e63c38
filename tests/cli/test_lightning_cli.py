from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger

from lightning_fedssl import MLP, Dirichlet, Experiment, FedAvg, SemiFL, algorithms
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.cli import FederatedCLI, main
from lightning_fedssl.cli.compare import read_suite, resolve
from tests.cli.helpers import CONFIG, failure, write

ONE_ROUND = ["fit", "--config", "run.yaml", "--trainer.max_rounds", "1"]
SAVED = "lightning_logs/version_0/config.yaml"


def build(*options: str) -> FederatedCLI:
    return FederatedCLI(args=["--config", "run.yaml", *options], run=False)


def parsed(*options: str) -> dict[str, Any]:
    """The configuration that options give, with ``run.yaml`` under them, as nested dicts."""
    config: dict[str, Any] = build(*options).config.as_dict()
    return config


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        main(["fit", *options, "--print_config"])
    return capsys.readouterr().out


def saved_weights(version: int) -> dict[str, torch.Tensor]:
    path = f"lightning_logs/version_{version}/checkpoints/last.ckpt"
    weights: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return weights


def test_later_files_and_then_options_win(folder: Path) -> None:
    write(
        "more.yaml", {"trainer": {"max_rounds": 7, "clients_per_round": 3}, "model": {"init_args": {"threshold": 0.5}}}
    )
    config = parsed("--config", "more.yaml", "--trainer.max_rounds", "9")
    assert (config["trainer"]["max_rounds"], config["trainer"]["clients_per_round"]) == (9, 3)
    assert (config["model"]["init_args"]["threshold"], config["model"]["init_args"]["client_epochs"]) == (0.5, 1)
    assert config["data"]["num_clients"] == 5


@pytest.mark.parametrize("files", [["run.yaml", "presets/images.yaml"], ["presets/images.yaml", "run.yaml"]])
def test_a_preset_after_a_file_of_one_s_own_is_named(
    folder: Path, caplog: pytest.LogCaptureFixture, files: list[str]
) -> None:
    write("short.yaml", {"model": "FedAvg"})
    FederatedCLI(args=[f"--config={name}" for name in ("short.yaml", *files)], run=False)
    assert "presets/images.yaml replaces" in caplog.text
    assert " model: " in caplog.text
    assert ("data.num_clients: 5," in caplog.text) == (files[0] == "run.yaml")


def test_another_method_keeps_the_arguments_that_it_shares(folder: Path) -> None:
    arguments = parsed("--model", "FedAvg")["model"]["init_args"]
    assert arguments["client_epochs"] == 1
    assert arguments["optimizer"]["init_args"]["lr"] == 0.1
    assert "threshold" not in arguments


@pytest.mark.parametrize("method", algorithms.__all__)
def test_an_optimizer_that_is_not_named_is_the_method_s_own(
    folder: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line builds what the class's own default does, and prints a name that can be read again."""
    signatures = [inspect.signature(c).parameters for c in getattr(algorithms, method).__mro__]
    default = next(parameters["optimizer"].default for parameters in signatures if "optimizer" in parameters)
    (own,) = default(torch.nn.Linear(1, 1).parameters()).param_groups
    write(
        "none.yaml", {"model": {"class_path": method, "init_args": {"network": "MLP"}}, "data": {"dataset": "digits"}}
    )
    write("printed.yaml", yaml.safe_load(printed(capsys, "--config", "none.yaml")))
    for file in ("none.yaml", "printed.yaml"):
        factory = Experiment.from_config(file).model.optimizer
        (group,) = factory(iter(torch.nn.Linear(1, 1).parameters())).param_groups
        assert {key: group[key] for key in group if key != "params"} == {k: own[k] for k in own if k != "params"}


def test_the_environment_gives_way_to_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDSSL_FIT__TRAINER__MAX_ROUNDS", "8")
    monkeypatch.setenv("FEDSSL_FIT__TRAINER__CHECK_VAL_EVERY_N_ROUNDS", "5")
    trainer = yaml.safe_load(printed(capsys, "--config", "run.yaml"))["trainer"]
    assert (trainer["max_rounds"], trainer["check_val_every_n_rounds"]) == (2, 5)


def test_the_printed_configuration_gives_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With Timer, the default of whose argument ``interval`` is no plain value."""
    options = ["--data.partition", "Dirichlet", "--data.partition.alpha", "0.2", "--trainer.callbacks=[Timer]"]
    first = printed(capsys, "--config", "run.yaml", *options)
    write("printed.yaml", first)
    assert printed(capsys, "--config", "printed.yaml") == first
    assert yaml.safe_load(first)["data"]["partition"]["init_args"]["alpha"] == 0.2
    assert "num_classes" not in first


def test_classes_are_named_by_their_bare_names(folder: Path) -> None:
    names = {
        "trainer": {
            "callbacks": [
                {"class_path": "FederatedCheckpoint", "init_args": {"monitor": "val/loss", "mode": "min"}},
                {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss"}},
            ],
            "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}},
        },
        "model": {"class_path": "FedAvg", "init_args": {"schedule": "Cosine", "optimizer": "Adam"}},
        "data": {"partition": {"class_path": "Dirichlet", "init_args": {"alpha": 0.1}}},
    }
    write("names.yaml", names)
    cli = build("--config", "names.yaml", "--trainer.callbacks+=CommunicationLedger")
    trainer: Any = cli.trainer
    assert [type(callback) for callback in trainer.callbacks[:2]] == [FederatedCheckpoint, EarlyStopping]
    assert "CommunicationLedger" in [type(callback).__name__ for callback in trainer.callbacks]
    assert [type(logger) for logger in trainer.loggers] == [CSVLogger]
    assert isinstance(cli.model, FedAvg)
    assert type(cli.model.schedule).__name__ == "Cosine"
    assert isinstance(cli.model.optimizer(iter(torch.nn.Linear(1, 1).parameters())), torch.optim.Adam)
    assert isinstance(cli.datamodule.partition, Dirichlet)
    assert cli.datamodule.partition.alpha == 0.1


def test_the_data_give_the_algorithm_classes_and_shape(folder: Path) -> None:
    model = build("--data.dataset", "emnist", "--data.download", "false").model
    assert isinstance(model, SemiFL)
    assert (model.num_classes, model.in_shape) == (47, (1, 28, 28))
    model.configure_model()
    assert isinstance(model.network, MLP)
    assert [p.shape[0] for p in model.network.parameters()][-1] == 47


def test_a_network_is_built_by_a_function_with_arguments(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link of the method's arguments to the data is no argument of the function."""
    write("own.py", "from torch import nn\ndef build(hidden: int) -> nn.Module:\n    return nn.Linear(64, hidden)\n")
    monkeypatch.syspath_prepend(".")
    cli = build("--model.network={class_path: own.build, init_args: {hidden: 10}}")
    assert isinstance(cli.model, SemiFL)


def test_the_configuration_in_a_run_folder_is_read_everywhere(folder: Path) -> None:
    assert main([*ONE_ROUND, "--trainer.default_root_dir", "mine"]) == 0
    saved = f"mine/{SAVED}"
    for command in ("validate", "test", "predict"):
        assert main([command, "--config", saved, "--ckpt_path", "last"]) == 0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*args parameter is intended")
        assert main(["test", "--ckpt_path", "mine/lightning_logs/version_0/checkpoints/last.ckpt"]) == 0
    assert len(list(Path("mine").glob("lightning_logs/version_*/predictions.csv"))) == 1
    assert main(["partition", "--config", saved]) == 0
    assert main(["deploy", "init", "app", "--config", saved]) == 0
    assert main(["export", "--config", saved, "--ckpt_path", "last"]) == 0
    assert Path("mine/lightning_logs/version_0/export/model.safetensors").is_file()
    write("more.yaml", {"trainer": {"max_rounds": 2}})
    assert main(["export", f"--config={saved}", "--config=more.yaml", "--ckpt_path=last", "--output=merged"]) == 0
    assert Path("merged/model.safetensors").is_file()
    assert main(["export", "--trainer.default_root_dir", "mine", "--ckpt_path", "last", "--output", "out"]) == 0
    assert Path("out/model.safetensors").is_file()
    assert Experiment.from_config(saved).trainer.max_rounds == 1
    suite = {"title": "t", "seeds": [0], "groups": [{"title": "g", "entries": [{"label": "a", "config": saved}]}]}
    write("suite.yaml", suite)
    (entry,) = read_suite(["suite.yaml"])[0].entries
    assert resolve(entry, []).config["trainer"]["max_rounds"] == 1


def test_the_configuration_of_a_resumed_run_is_that_of_the_whole_run(folder: Path) -> None:
    """It names no checkpoint, since the resumed run equals one without interruption."""
    assert main(ONE_ROUND) == 0
    assert main(["fit", "--config", "run.yaml", "--ckpt_path", "last"]) == 0
    assert "ckpt_path" not in yaml.safe_load(Path("lightning_logs/version_1/config.yaml").read_text())
    assert main(["fit", "--config", "lightning_logs/version_1/config.yaml"]) == 0
    first, second = saved_weights(1), saved_weights(2)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_untrained_weights_are_not_evaluated(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = failure(capsys, command, "--config", "run.yaml")
    if command == "predict":  # takes what the run has chosen
        assert "ckpt_path" in message
        assert "chosen.ckpt does not exist" in message
    else:
        assert message.startswith(f"{command}: no checkpoint given: add --ckpt_path best (or last, or a file)")
    assert not Path("lightning_logs").exists()


def test_weights_from_a_file_are_evaluated(folder: Path) -> None:
    torch.save(MLP(10, (1, 8, 8), (8,)).state_dict(), "weights.pt")
    assert main(["test", "--config", "run.yaml", "--model.init_from", "weights.pt"]) == 0
    assert "test/accuracy" in Path("lightning_logs/version_0/metrics.csv").read_text()


def test_a_run_without_loggers_saves_no_configuration(folder: Path) -> None:
    assert main([*ONE_ROUND, "--trainer.logger", "false"]) == 0
    assert list(Path().rglob("config.yaml")) == []


def test_a_configuration_of_the_package_gives_way_to_a_file_of_its_name(folder: Path) -> None:
    options = ("--config", "semifl_digits.yaml")
    assert FederatedCLI(args=[*options], run=False).config["data.num_clients"] == 20
    write("semifl_digits.yaml", CONFIG)
    assert FederatedCLI(args=[*options], run=False).config["data.num_clients"] == 5


def test_a_group_of_keys_may_have_a_file_of_its_own(folder: Path) -> None:
    Path("parts").mkdir()
    write("parts/data.yaml", {"num_clients": 4})
    write("parts/run.yaml", {"data": "data.yaml"})
    assert parsed("--config", "parts/run.yaml")["data"]["num_clients"] == 4
    assert parsed("--data", "parts/data.yaml")["data"]["num_clients"] == 4
