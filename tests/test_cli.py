from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.loggers import CSVLogger

from lightning_fedssl import (
    CNN,
    MLP,
    Dirichlet,
    Experiment,
    FedAvg,
    FederatedDataModule,
    SemiFL,
    __main__,
    algorithms,
    data,
)
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.cli import listing, messages
from lightning_fedssl.cli.config_files import package_files
from lightning_fedssl.cli.entry import COMMANDS, FederatedCLI, find_config, main
from lightning_fedssl.cli.keys import SCRIPTS
from lightning_fedssl.cli.seed import draw_seed
from lightning_fedssl.data.datasets import SPECS
from lightning_fedssl.data.partition.base import Partition
from lightning_fedssl.trainer import FederatedTrainer
from tests.forked_command import start

SOURCES = {
    "Arrays", "BreastCancer", "Datasets", "FromLightning", "HuggingFace", "ImageTable", "Signals", "SiteFolders"
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "seed_everything": 3,
    "trainer": {"max_rounds": 2, "clients_per_round": 2, "accelerator": "cpu"},
    "model": {
        "class_path": "SemiFL",
        "init_args": {
            "network": {"class_path": "MLP", "init_args": {"hidden": [8]}},
            "optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1}},
            "client_epochs": 1,
            "server_epochs": 1,
        },
    },
    "data": {"num_clients": 5, "num_labels": 20, "max_train_images": 200, "max_test_images": 50, "partition": "Shards"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder that holds ``run.yaml``, a small run."""
    monkeypatch.chdir(tmp_path)
    write("run.yaml", CONFIG)
    return tmp_path


def write(name: str, content: object) -> None:
    Path(name).write_text(content if isinstance(content, str) else yaml.safe_dump(content))


def parsed(*options: str) -> dict[str, Any]:
    """The configuration that options give, with ``run.yaml`` under them, as nested dicts."""
    config: dict[str, Any] = build(*options).config.as_dict()
    return config


def build(*options: str) -> FederatedCLI:
    return FederatedCLI(args=["--config", "run.yaml", *options], run=False)


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["fit", *options, "--print_config"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a failing command prints; it must be one line, without traceback."""
    try:
        code: object = main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ") or "Traceback" in line]
    assert code in (1, 2)
    assert len(lines) == 1
    return lines[0].removeprefix("error: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainer.max_round", "3"], "there is no option --trainer.max_round; did you mean --trainer.max_rounds?"),
        (["--data.num_client", "3"], "there is no option --data.num_client; did you mean --data.num_clients?"),
        (["--model.treshold", "0.5"], "model: SemiFL takes no treshold; did you mean --model.threshold?"),
        (["--model.lr", "0.5"], "model: SemiFL takes no lr; did you mean --model.optimizer.lr?"),
        (["--lr", "0.5"], "there is no option --lr; did you mean --model.optimizer.lr?"),
        (["--optimizer.lr", "0.5"], "there is no option --optimizer.lr; did you mean --model.optimizer.lr?"),
        (["--model.optimizer.lrr", "0.5"], "model.optimizer: SGD takes no lrr; did you mean --model.optimizer.lr?"),
        (
            ["--model", "FedAvg", "--model.server_optimizer.lr", "1"],
            "model.server_optimizer: name the class before its",
        ),
        (["--data.partition.alpha", "1"], "data.partition: Shards takes no alpha; there are: classes_per_client"),
        (["--model", "SemiFLL"], "model: there is no class SemiFLL; did you mean SemiFL?"),
        (["--model", "uda"], "model: there is no class uda; did you mean UDA?"),
        (["--model", "nothing"], "model: there is no class nothing; there are: DataSharing, EASGD, FedAvg, FedMatch,"),
        (["--model.network", "cnn"], "model.network: there is no class cnn; did you mean CNN?"),
        (["--model.optimizer", "adamw"], "model.optimizer: there is no class adamw; did you mean AdamW?"),
        (["--model.network", "MLPP"], "model.network: there is no class MLPP; did you mean MLP?"),
        (["--data.partition", "Dirichlett"], "data.partition: there is no class Dirichlett; did you mean Dirichlet?"),
        (["--trainer.logger", "CSVLoger"], "trainer.logger: there is no class CSVLoger; did you mean CSVLogger?"),
        (["--trainer.callbacks", "nowhere.Callback"], "trainer.callbacks: No module named 'nowhere'"),
        (["--model", "lightning_fedssl.Shards"], "model: lightning_fedssl.Shards is no FederatedAlgorithm; there are:"),
        (["--trainer.metrics", "[macrof1]"], "trainer.metrics: there is no class macrof1; did you mean macro_f1?"),
        (
            ["--trainer.metrics", "[Recall]"],
            "trainer.metrics: this class is of no single task: give one such as MulticlassRecall, or a name: macro_f1,",
        ),
        (["--trainer.max_rounds", "many"], "trainer.max_rounds: expected a whole number, got many"),
        (["--trainer.max_rounds"], "trainer.max_rounds needs a value"),
        (["--data.num_labels", "few"], "data.num_labels: expected a whole number or all, got few"),
        (["--model.threshold", "high"], "model.threshold: expected a number, got high"),
        (["--model.network.hidden", "[a]"], "model.network.hidden: expected a whole number, got a"),
        (["--model.optimizer.lr", "fast"], "model.optimizer.lr: expected a number, got fast"),
        (["--trainer.fast_dev_run", "maybe"], "trainer.fast_dev_run: expected true or false, got maybe"),
        (["--trainer.precision", "fp8"], "trainer.precision: expected one of 32-true, bf16-mixed, 64-true, got fp8"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: there is no such file; lightning-fedssl configs lists"),
        (["--trainer", "nowhere.yaml"], "trainer: Unable to load config 'nowhere.yaml'"),
        (["--trainer.max_rounds", "0"], "trainer.max_rounds is 0: give 1 or more"),
        (["--data.num_clients", "-1"], "data.num_clients must be a whole number of at least 1, got -1"),
        (["--model.threshold", "3"], "model.threshold is 3.0: give a probability between 0 and 1"),
        (["--model.num_classes", "7"], "model.num_classes is 7, but the data have 10: leave it out"),
        (["--model.in_shape", "[1, 9, 9]"], "model.in_shape is (1, 9, 9), but the data have (1, 8, 8): leave it out"),
        (["--trainer.clients_per_round", "9"], "trainer.clients_per_round is 9, but data.num_clients is only 5"),
        (["--seed_everything", "-1"], "seed_everything is -1: give a whole number from 0 to 4294967295"),
        (["--ckpt_path", "nowhere.ckpt"], "ckpt_path: there is no file nowhere.ckpt"),
    ],
)
def test_a_bad_option_is_reported_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert failure(capsys, "fit", "--config", "run.yaml", *options).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"trainer": {"max_round": 3}},
            "bad.yaml: there is no key trainer.max_round; did you mean trainer.max_rounds?",
        ),
        (
            {"trainr": {"max_rounds": 3}},
            "bad.yaml: there is no key trainr.max_rounds; did you mean trainer.max_rounds?",
        ),
        ({"trainer": {"max_rounds": "many"}}, "bad.yaml: trainer.max_rounds: expected a whole number, got many"),
        ({"model": "SemiFLL"}, "bad.yaml: model: there is no class SemiFLL; did you mean SemiFL?"),
        (
            {"model": {"class_path": "SemiFL", "init_args": {"treshold": 1}}},
            "bad.yaml: model: SemiFL takes no treshold; did you mean threshold?",
        ),
        (
            {"trainer": {"callbacks": [{"class_path": "FederatedCheckpoint", "init_args": {"monitr": "x"}}]}},
            "bad.yaml: trainer.callbacks: FederatedCheckpoint takes no monitr; did you mean monitor?",
        ),
        (
            {"model": {"class_path": "SemiFL", "threshold": 1}},
            "bad.yaml: model: arguments of the class stand one level",
        ),
        (
            {"data": {"class_path": "X", "init_args": {"num_clients": 2}}},
            "bad.yaml: there is no key data.init_args.num_clients;",
        ),
        ("trainer:\n  max_rounds: 3\n   devices: 1\n", "bad.yaml: not valid YAML, line 3, column 11: mapping values"),
        (
            "trainer:\n\tmax_rounds: 3\n",
            "bad.yaml: not valid YAML, line 2, column 1: found character that cannot start any token; indent with",
        ),
        (
            "model: Supervised\nmodel.network: MLP\n",
            "bad.yaml: the keys model and model.network are both given, and one of them would be lost: write one",
        ),
        (
            "trainer.max_rounds: 3\ntrainer: {devices: 1}\n",
            "bad.yaml: the keys trainer and trainer.max_rounds are both given, and one of them would be lost: write "
            "one mapping, trainer: {...}",
        ),
        ("- trainer\n- model\n", "bad.yaml: the file holds no keys; it needs trainer, model and data"),
    ],
)
def test_a_bad_file_is_reported_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], content: object, message: str
) -> None:
    write("bad.yaml", content)
    assert failure(capsys, "fit", "--config", "run.yaml", "--config", "bad.yaml").startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit"], "model: missing; give --config FILE, or --model with the name of a method"),
        (["fit", "--model", "FedAvg"], "model: FedAvg needs network"),
        (
            ["train"],
            "'validate', 'test', 'predict', 'replay', 'tune', 'compare', 'partition', 'export', 'deploy', 'new'",
        ),
        (["--config", "run.yaml", "fit"], "options must follow the command: lightning-fedssl fit --config FILE"),
        (["fit", "run.yaml"], "run.yaml follows no option; give a configuration as --config run.yaml"),
        (["compare", "run.yaml"], "this is a configuration of one run: lightning-fedssl fit --config run.yaml"),
        (["tune", "--nothing", "3"], "there is no option --nothing; see lightning-fedssl tune --help"),
        (
            ["tune", "--config", "run.yaml", "--ckpt_path", "last"],
            "tune reads no checkpoint: leave out --ckpt_path last",
        ),
        (["export", "--nothing", "3"], "there is no option --nothing; see lightning-fedssl export --help"),
        (["export", "--json", "true"], "--json is for commands that train or evaluate: leave it out"),
        (["partition", "--json", "true"], "that train or evaluate: --output FOLDER writes partition.json"),
    ],
)
def test_a_bad_command_is_reported_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert failure(capsys, *arguments).endswith(message)


def test_a_bad_environment_variable_is_reported_with_its_key(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSSL_FIT__TRAINER__MAX_ROUNDS", "many")
    assert failure(capsys, "fit", "--config", "run.yaml") == "trainer.max_rounds: expected a whole number, got many"


def test_a_pickle_given_as_checkpoint_does_not_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (folder / "exploded",))

    Path("bomb.ckpt").write_bytes(pickle.dumps(Bomb()))
    assert failure(capsys, "test", "--config", "run.yaml", "--ckpt_path", "bomb.ckpt").startswith(
        "ckpt_path: bomb.ckpt"
    )
    assert not (folder / "exploded").exists()


def test_an_error_of_another_kind_keeps_its_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(FederatedTrainer, "fit", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["fit", "--config", "run.yaml"])


def test_the_traceback_of_bad_input_can_be_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSSL_TRACEBACK", "1")
    with pytest.raises(ValueError, match=r"trainer\.max_rounds is 0"):
        main(["fit", "--config", "run.yaml", "--trainer.max_rounds", "0"])


def test_ctrl_c_outside_a_round_ends_without_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FederatedTrainer, "fit", interrupt)
    assert main(["fit", "--config", "run.yaml"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"


def test_a_second_ctrl_c_is_ignored_while_python_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = []
    monkeypatch.setattr("sys.argv", ["lightning-fedssl", "fit", "--config", "semifl_digits.yaml"])
    monkeypatch.setattr("lightning_fedssl.__main__._run", lambda: 130)
    monkeypatch.setattr("signal.signal", lambda number, handler: handlers.append((number, handler)))
    assert __main__.main() == 130
    assert handlers == [(signal.SIGINT, signal.SIG_IGN)]


class Unready(Callback):
    """Refuses every number; a user's callback, which jsonargparse makes for a key."""

    def __init__(self, kind: str) -> None:
        if kind == "value":
            raise ValueError("Unready.kind must be something else")
        raise KeyError(kind)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("value", "Unready: Unready.kind must be something else"),
        ("other", "Unready: KeyError: 'other' (FEDSSL_TRACEBACK=1 shows where it comes from)"),
    ],
)
@pytest.mark.parametrize("many", [True, False])
def test_an_error_in_the_constructor_of_a_users_class_is_one_line(kind: str, message: str, many: bool) -> None:
    """jsonargparse tries a value as each type of a union, and raises an error that does not name the class."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[Callback] | Callback | None)
    given = {"class_path": f"{__name__}.Unready", "init_args": {"kind": kind}}
    options = parser.parse_object({"callbacks": [given] if many else given})
    with pytest.raises((ValueError, KeyError)) as caught:
        parser.instantiate_classes(options)
    assert messages.describe(caught.value) == message


def test_only_errors_raised_by_the_package_or_lightning_are_described() -> None:
    def caught(call: Any, *arguments: Any) -> str | None:
        try:
            call(*arguments)
        except Exception as error:
            return messages.describe(error)
        raise AssertionError("nothing was raised")

    def wrapped() -> None:
        try:
            FederatedTrainer(max_rounds=0)
        except ValueError as error:
            raise ValueError("some wrapping") from error

    assert caught(int, "x") is None
    assert caught(torch.zeros(2).reshape, 3) is None
    assert caught(yaml.safe_load, "[") is None
    assert caught(wrapped) == "trainer.max_rounds is 0: give 1 or more"


def test_later_files_and_then_options_win(folder: Path) -> None:
    write(
        "more.yaml", {"trainer": {"max_rounds": 7, "clients_per_round": 3}, "model": {"init_args": {"threshold": 0.5}}}
    )
    config = parsed("--config", "more.yaml", "--trainer.max_rounds", "9")
    assert config["trainer"]["max_rounds"] == 9
    assert config["trainer"]["clients_per_round"] == 3
    assert config["model"]["init_args"]["threshold"] == 0.5
    assert config["model"]["init_args"]["client_epochs"] == 1
    assert config["data"]["num_clients"] == 5


def test_an_option_before_a_file_wins_over_it(folder: Path) -> None:
    """The parser applies arguments in their order; a class that an option names is known to a file after it."""
    write("part.yaml", "model.threshold: 0.6\n")
    before = ["--trainer.max_rounds=9", "--trainer.callbacks+=CommunicationLedger", "--data.partition", "Dirichlet"]
    config = FederatedCLI(args=[*before, "-c", "run.yaml"], run=False).config.as_dict()
    assert config["trainer"]["max_rounds"] == 9
    assert [each["class_path"].rpartition(".")[2] for each in config["trainer"]["callbacks"]] == ["CommunicationLedger"]
    assert config["data"]["partition"]["class_path"].endswith("Dirichlet")
    method = ["--model", "SemiFL", "--model.network", "MLP", "--config", "part.yaml"]
    assert FederatedCLI(args=method, run=False).config.as_dict()["model"]["init_args"]["threshold"] == 0.6


def test_another_method_keeps_the_arguments_that_it_shares(folder: Path) -> None:
    arguments = parsed("--model", "FedAvg")["model"]["init_args"]
    assert arguments["client_epochs"] == 1
    assert arguments["optimizer"]["init_args"]["lr"] == 0.1
    assert "threshold" not in arguments


@pytest.mark.parametrize("method", ["FedAvg", "SemiFL", "FedSHVR", "MeanTeacher", "FedMatch", "SemiSFL"])
def test_an_optimizer_has_the_arguments_that_its_file_gives_and_the_class_s_own_defaults(
    folder: Path, method: str
) -> None:
    write("sgd.yaml", {"model": {"class_path": method, "init_args": {"network": "MLP", "optimizer": "SGD"}}})
    write("rate.yaml", {"model": {"init_args": {"optimizer": {"class_path": "SGD", "init_args": {"lr": 0.2}}}}})
    data = ("--data.dataset", "digits")
    alone = FederatedCLI(args=["--config", "sgd.yaml", *data], run=False).config["model"].init_args.optimizer
    assert (alone.init_args.lr, alone.init_args.momentum) == (0.001, 0.0)
    cli = FederatedCLI(args=["--config", "sgd.yaml", "--config", "rate.yaml", *data], run=False)
    (group,) = cli.model.optimizer_factory(iter(torch.nn.Linear(1, 1).parameters())).param_groups
    assert (group["lr"], group["momentum"]) == (0.2, 0.0)


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
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--config", "none.yaml", "--print_config"])
    write("printed.yaml", yaml.safe_load(capsys.readouterr().out))
    for file in ("none.yaml", "printed.yaml"):
        factory = Experiment.from_config(file).model.optimizer_factory
        (group,) = factory(iter(torch.nn.Linear(1, 1).parameters())).param_groups
        assert {key: group[key] for key in group if key != "params"} == {k: own[k] for k in own if k != "params"}


@pytest.mark.parametrize("name", algorithms.__all__)
def test_default_functions_are_quick_to_read(name: str) -> None:
    """jsonargparse parses the module of a default function several times if it imports for type checking only."""
    defaults = [p.default for c in getattr(algorithms, name).__mro__ for p in inspect.signature(c).parameters.values()]
    modules = {inspect.getmodule(default) for default in defaults if inspect.isfunction(default)}
    assert modules
    assert [module for module in modules if "TYPE_CHECKING" in inspect.getsource(module or str)] == []


def test_the_environment_gives_way_to_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSSL_TRAINER__MAX_ROUNDS", "8")
    monkeypatch.setenv("FEDSSL_TRAINER__CHECK_VAL_EVERY_N_ROUNDS", "5")
    trainer = parsed()["trainer"]
    assert trainer["max_rounds"] == 2
    assert trainer["check_val_every_n_rounds"] == 5


def test_the_printed_configuration_gives_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = printed(capsys, "--config", "run.yaml", "--data.partition", "Dirichlet", "--data.partition.alpha", "0.2")
    write("printed.yaml", first)
    assert printed(capsys, "--config", "printed.yaml") == first
    assert yaml.safe_load(first)["data"]["partition"]["init_args"]["alpha"] == 0.2
    assert "num_classes" not in first


def test_classes_are_named_by_their_bare_names(folder: Path) -> None:
    write(
        "names.yaml",
        {
            "trainer": {
                "callbacks": [
                    {"class_path": "FederatedCheckpoint", "init_args": {"monitor": "val/loss", "mode": "min"}},
                    {"class_path": "EarlyStopping", "init_args": {"monitor": "val/loss"}},
                ],
                "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "logs"}},
            },
            "model": {"class_path": "FedAvg", "init_args": {"schedule": "Cosine", "optimizer": "Adam"}},
            "data": {"partition": {"class_path": "Dirichlet", "init_args": {"alpha": 0.1}}},
        },
    )
    cli = build("--config", "names.yaml")
    trainer: Any = cli.trainer
    assert [type(callback) for callback in trainer.callbacks[:2]] == [FederatedCheckpoint, EarlyStopping]
    assert [type(logger) for logger in trainer.loggers] == [CSVLogger]
    assert isinstance(cli.model, FedAvg)
    assert type(cli.model.schedule).__name__ == "Cosine"
    assert isinstance(cli.model.optimizer_factory(iter(torch.nn.Linear(1, 1).parameters())), torch.optim.Adam)
    assert isinstance(cli.datamodule.partition, Dirichlet)
    assert cli.datamodule.partition.alpha == 0.1


def test_the_data_tell_the_algorithm_classes_and_shape(folder: Path) -> None:
    model = build("--data.dataset", "emnist", "--data.download", "false").model
    assert isinstance(model, SemiFL)
    assert (model.num_classes, model.in_shape) == (47, (1, 28, 28))
    model.configure_model()
    assert isinstance(model.network, MLP)
    assert [p.shape[0] for p in model.network.parameters()][-1] == 47


def test_a_typed_value_that_agrees_with_the_data_is_accepted(folder: Path) -> None:
    model = build("--model.num_classes", "10", "--model.in_shape", "[1, 8, 8]").model
    assert (model.num_classes, model.in_shape) == (10, (1, 8, 8))


def test_a_seed_of_one_is_a_number_and_true_draws_one(folder: Path) -> None:
    assert parsed("--seed_everything", "1")["seed_everything"] is not True
    drawn = [parsed("--seed_everything", "true")["seed_everything"] for _ in range(2)]  # the first sets PL_GLOBAL_SEED
    assert all(type(seed) is int and seed >= 0 for seed in drawn)
    assert drawn[0] != drawn[1]
    assert main(["fit", "--config", "run.yaml", "--seed_everything", "true", "--trainer.fast_dev_run", "true"]) == 0
    assert int(os.environ["PL_GLOBAL_SEED"]) not in drawn


def test_a_rank_takes_the_seed_that_the_first_process_has_drawn() -> None:
    ranks = {"LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    assert draw_seed({**ranks, "PL_GLOBAL_SEED": "7"}) == 7
    with pytest.raises(ValueError, match="would draw different seeds: give a whole number"):
        draw_seed(ranks)
    assert draw_seed({"LOCAL_RANK": "0", "WORLD_SIZE": "1"}) != draw_seed({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})


def test_a_configuration_of_the_package_is_found_by_name(folder: Path) -> None:
    assert find_config("semifl_digits.yaml").parent.name == "configs"
    write("semifl_digits.yaml", CONFIG)
    assert find_config("semifl_digits.yaml") == Path("semifl_digits.yaml")


def test_a_run_repeated_from_its_saved_configuration_is_the_same(folder: Path) -> None:
    assert main(["fit", "--config", "run.yaml", "--trainer.max_rounds", "1", "--model.threshold", "0.2"]) == 0
    saved = "lightning_logs/version_0/config.yaml"
    assert yaml.safe_load(Path(saved).read_text())["model"]["init_args"]["threshold"] == 0.2
    assert main(["fit", "--config", saved]) == 0
    first, second = (
        torch.load(f"lightning_logs/version_{n}/checkpoints/last.ckpt", weights_only=True)["state_dict"] for n in (0, 1)
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_configuration_in_a_run_folder_is_read_everywhere(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has the keys of ``fit`` alone, too; a checkpoint is refused where none would be read."""
    assert main(["fit", "--config", "run.yaml", "--trainer.max_rounds", "1"]) == 0
    saved = "lightning_logs/version_0/config.yaml"
    assert main(["partition", "--config", saved]) == 0
    assert main(["deploy", "init", "app", "--config", saved]) == 0
    assert main(["export", "--config", saved, "--output", "exported"]) == 0
    assert Experiment.from_config(saved).trainer.max_rounds == 1
    suite = {"title": "t", "seeds": [0], "groups": [{"title": "g", "entries": [{"label": "a", "config": saved}]}]}
    write("suite.yaml", suite)
    assert main(["compare", "suite.yaml", "--trainer.enable_progress_bar", "false"]) == 0
    with pytest.raises(ValueError, match="ckpt_path is last, but no checkpoint is read here"):
        Experiment.from_config(saved, {"ckpt_path": "last"})


def test_the_configuration_of_a_resumed_run_is_that_of_the_whole_run(folder: Path) -> None:
    """Which equals one without interruption; the result names the checkpoint."""
    assert main(["fit", "--config", "run.yaml", "--trainer.max_rounds", "1"]) == 0
    assert main(["fit", "--config", "run.yaml", "--ckpt_path", "last", "--json", "true"]) == 0
    assert main(["fit", "--config", "run.yaml", "--trainer.max_rounds", "1"]) == 0
    runs = [Path(f"lightning_logs/version_{number}") for number in range(4)]
    resumed = yaml.safe_load((runs[1] / "config.yaml").read_text())
    assert (resumed["ckpt_path"], resumed["json"]) == (None, False)
    results = [json.loads((run / "result.json").read_text())["ckpt_path"] for run in runs[:3]]
    assert results == [None, str((runs[0] / "checkpoints/last.ckpt").resolve()), None]
    assert main(["fit", "--config", f"{runs[1]}/config.yaml"]) == 0
    first, second = (torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for run in runs[1::2])
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_configuration_of_an_evaluation_names_its_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loss(*arguments: str) -> float:
        capsys.readouterr()
        assert main(["test", *arguments, "--json", "true"]) == 0
        return float(json.loads(capsys.readouterr().out)["metrics"]["test/loss"])

    assert main(["fit", "--config", "run.yaml", "--trainer.max_rounds", "1"]) == 0
    first = loss("--config", "run.yaml", "--ckpt_path", "last")
    assert main(["fit", "--config", "run.yaml", "--model.threshold", "0.1", "--seed_everything", "5"]) == 0
    assert loss("--config", "run.yaml", "--ckpt_path", "last", "--seed_everything", "5") != first
    assert loss("--config", "lightning_logs/version_1/config.yaml") == first


def test_keys_below_a_group_of_the_same_file_are_merged(folder: Path) -> None:
    write("more.yaml", "trainer: {max_rounds: 7}\ntrainer.clients_per_round: 3\n")
    trainer = parsed("--config", "more.yaml")["trainer"]
    assert (trainer["max_rounds"], trainer["clients_per_round"]) == (7, 3)


def test_a_command_that_reads_no_checkpoint_accepts_the_configuration_of_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(FederatedTrainer, "tune", lambda trainer, model, datamodule: asked.append(trainer))
    monkeypatch.setattr(FederatedCLI, "after_tune", lambda cli: None)
    write("saved.yaml", CONFIG | {"ckpt_path": None})
    assert main(["tune", "--config", "saved.yaml"]) == 0
    assert len(asked) == 1


def test_a_key_beside_its_parent_keeps_both(folder: Path) -> None:
    """As on the command line, in order: the class first, then its arguments."""
    _, model, data = Experiment.from_config(
        "run.yaml",
        {"model": "Supervised", "model.server_epochs": 3, "data.partition": "Dirichlet", "data.partition.alpha": 0.25},
    )
    assert (type(model).__name__, model.hparams["server_epochs"]) == ("Supervised", 3)
    assert (type(data.partition).__name__, vars(data.partition)["alpha"]) == ("Dirichlet", 0.25)
    model = Experiment.from_config("run.yaml", {"model.optimizer": "Adam", "model.optimizer.lr": 0.5}).model
    optimizer = model.optimizer_factory(iter(torch.nn.Linear(1, 1).parameters()))
    assert (type(optimizer).__name__, optimizer.param_groups[0]["lr"]) == ("Adam", 0.5)


def test_predictions_are_named_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", "run.yaml", "--trainer.max_rounds", "1"]) == 0
    capsys.readouterr()
    assert main(["predict", "--config", "run.yaml", "--ckpt_path", "last", "--json", "true"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert Path(json.loads(line)["predictions"]).read_text().startswith("image,")
    for more in (["--trainer.fast_dev_run", "true"], ["--trainer.strategy", "ddp_spawn", "--trainer.devices", "2"]):
        assert main(["predict", "--config", "run.yaml", "--ckpt_path", "last", "--json", "true", *more]) == 0
    trial, spawned = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert trial["predictions"] is None
    assert Path(spawned["predictions"]).parent == Path(spawned["run_folder"])
    assert spawned["partition"] == trial["partition"]


def test_export_reads_the_folder_of_the_runs_as_fit_writes_it(folder: Path) -> None:
    assert main(["fit", "--config", "run.yaml", "--trainer.max_rounds", "1", "--trainer.default_root_dir", "mine"]) == 0
    assert main(["export", "--trainer.default_root_dir", "mine", "--ckpt_path", "last", "--output", "out"]) == 0
    assert Path("out/model.safetensors").is_file()
    write("root.yaml", {"trainer.default_root_dir": "mine"})
    assert main(["export", "--config", "root.yaml", "--trainer.max_rounds", "3", "--ckpt_path", "last"]) == 0
    assert Path("mine/lightning_logs/version_0/export/model.safetensors").is_file()


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


def test_a_mapping_from_python_may_hold_paths_classes_and_numbers_of_numpy(folder: Path) -> None:
    values = {"trainer.default_root_dir": folder, "data": {"num_clients": np.int64(5)}, "model.network": CNN}
    trainer, model, data = Experiment.from_config("run.yaml", values, {"model.threshold": np.linspace(0.5, 1, 3)[1]})
    assert (trainer.default_root_dir, data.num_clients) == (str(folder), 5)
    assert vars(model)["threshold"] == 0.75
    model.configure_model()
    assert isinstance(model.network, CNN)


@pytest.mark.parametrize(
    ("configurations", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml: there is no such file; lightning-fedssl configs lists those of the package"),
        (["digits.yaml"], "digits.yaml: this is a suite of several runs: lightning-fedssl compare digits.yaml"),
        (["run.yaml", {"trainer.max_round": 3}], "there is no key trainer.max_round; did you mean trainer.max_rounds?"),
        ([Path("run.yaml"), {"model.threshold": 3}], "model.threshold is 3.0: give a probability between 0 and 1"),
        (["run.yaml", {"model.network": MLP()}], "model.network: a configuration cannot hold an object of type MLP"),
        (["run.yaml", {"trainer": {"callbacks": [object()]}}], "trainer.callbacks: a configuration cannot hold an"),
    ],
)
def test_a_wrong_configuration_from_python_is_one_line(folder: Path, configurations: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        Experiment.from_config(*configurations)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_is_evaluated_by_the_other_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", "run.yaml", "--trainer.max_rounds", "1"]) == 0
    for command in ("validate", "test", "predict"):
        assert main([command, "--config", "lightning_logs/version_0/config.yaml", "--ckpt_path", "last"]) == 0
    assert len(list(Path().glob("lightning_logs/version_*/predictions.csv"))) == 1


class NoKeywords(FedAvg):
    """A user's method that passes nothing on."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__(network=MLP)


def test_a_method_without_keyword_arguments_is_told_how_to_take_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "{class_path: tests.test_cli.NoKeywords, init_args: {network: MLP}}"
    assert failure(capsys, "fit", "--config", "run.yaml", f"--model={model}") == (
        "model: NoKeywords takes no network: let its __init__ take **kwargs and pass them on to "
        "super().__init__(**kwargs)"
    )


def test_compare_says_how_a_suite_and_its_seeds_are_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = failure(capsys, "compare", "digits.yaml", "--seeds", "0")
    assert message == "--seeds: '0' is no list of whole numbers; give one such as [0] or [0,1,2]"
    problem = __main__._quick_refusal(["compare", "--config", "mine.yaml"])
    assert problem == "compare takes a suite, without --config: lightning-fedssl compare mine.yaml"


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_untrained_weights_are_not_evaluated(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = failure(capsys, command, "--config", "run.yaml")
    assert message.startswith(f"{command}: no checkpoint given: add --ckpt_path best (or last, or a file); without")
    assert not Path("lightning_logs").exists()


def test_weights_from_a_file_are_evaluated(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    network = MLP(10, (1, 8, 8), (8,))
    torch.save(network.state_dict(), "weights.pt")
    assert main(["test", "--config", "run.yaml", "--model.init_from", "weights.pt"]) == 0
    assert "no ckpt_path given: using the weights of model.init_from, weights.pt" in caplog.text


def test_a_run_without_loggers_saves_no_configuration(folder: Path) -> None:
    assert main(["fit", "--config", "run.yaml", "--trainer.max_rounds", "1", "--trainer.logger", "false"]) == 0
    assert list(Path().rglob("config.yaml")) == []


class SmallData(FederatedDataModule):
    """A user's own data module.

    Args:
        size: Training images.
    """

    def __init__(self, size: int = 60, num_clients: int = 3) -> None:
        super().__init__(num_clients=num_clients, num_labels=20, max_train_images=size, max_test_images=20)


def test_a_data_module_of_ones_own_has_its_own_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("own.yaml", {**CONFIG, "data": {"size": 50}})
    cli = FederatedCLI(args=["--config", "own.yaml", "--data.num_clients", "2"], run=False, datamodule_class=SmallData)
    assert isinstance(cli.datamodule, SmallData)
    assert (cli.datamodule.max_train_images, cli.datamodule.num_clients) == (50, 2)
    with pytest.raises(SystemExit):
        main(["fit", "--config", "own.yaml", "--data.sise", "3"], datamodule_class=SmallData)
    assert "did you mean --data.size?" in capsys.readouterr().err


def run(*command: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__main__.__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_the_program_and_its_class_are_offered_by_the_package() -> None:
    from lightning_fedssl import cli

    assert cli.main is main
    assert cli.FederatedCLI is FederatedCLI
    with pytest.raises(AttributeError, match="mainn"):
        _ = cli.mainn


def test_help_comes_before_any_heavy_import() -> None:
    code = "import sys, lightning_fedssl.__main__ as m; sys.argv[1:] = ['--help']; m.main(); assert 'torch' not in "
    result = run(sys.executable, "-c", code + "sys.modules")
    assert result.returncode == 0, result.stderr
    assert f"{{{','.join(COMMANDS)}}}" in result.stdout
    assert all(f"lightning-fedssl {command}" in result.stdout for command in SCRIPTS)
    assert ", ".join(listing.COMMANDS) in result.stdout


@pytest.mark.parametrize("kind", list(listing.COMMANDS))
def test_a_listing_names_what_the_package_exports_without_a_heavy_import(kind: str) -> None:
    code = "import sys, lightning_fedssl.__main__ as m; m.main(); assert 'torch' not in sys.modules"
    result = run(sys.executable, "-c", code, kind)
    assert result.returncode == 0, result.stderr
    expected = {
        "methods": {n for n in algorithms.__all__ if n[0].isupper()},
        "configs": {name for name in package_files() if "suites/" not in name},
        "suites": {name.removeprefix("suites/") for name in package_files() if "suites/" in name},
        "datasets": {*SPECS, *SOURCES},
        "partitions": {n for n in data.__all__ if issubclass(getattr(data, n), Partition)} - {"Partition"},
        "availability": {"RandomDropout", "UnevenDropout", "DiurnalDropout"},
    }[kind]
    rows = [line.split("  ", 1) for line in result.stdout.splitlines()[:-2]]
    assert {name.strip() for name, *_ in rows} == expected
    lines = [about.strip() for _, about in rows]
    assert all(lines)
    assert len(set(lines)) == len(lines) or kind == "datasets"  # three of them are alike in classes and shape
    assert not [line for line in lines if re.search(r"\b(Figs?|Eq|App|al)$", line)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fitt"], "there is no command fitt; did you mean fit?"),
        (
            ["fit", "--config", "semifl_digit.yaml"],
            "semifl_digit.yaml: there is no such file; did you mean semifl_digits",
        ),
        (["fit", "--config"], "--config needs a value: a file, or a name that lightning-fedssl configs lists"),
        (
            ["compare", "semifl_digits.yaml"],
            "semifl_digits.yaml: this is a configuration of one run: lightning",
        ),
        (["fit", "--config=mnist.yaml"], "mnist.yaml: this is a suite of several runs: lightning-fedssl compare mnist"),
        (
            ["methods", "SemiFL"],
            "methods takes no arguments: leave out SemiFL; use: --model NAME; its keys: lightning-fedssl fit",
        ),
        (["availability", "x", "y"], "availability takes no arguments: leave out x y; use: --trainer.availability"),
        (["test", "--config", "nowhere"], "nowhere: there is no such file; lightning-fedssl configs lists"),
    ],
)
def test_a_wrong_command_or_file_is_refused_before_any_heavy_import(
    folder: Path, arguments: list[str], words: str
) -> None:
    code = (
        "import sys, lightning_fedssl.__main__ as m; code = m.main(); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    result = run(sys.executable, "-c", code, *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {words}")
    assert len(result.stderr.splitlines()) == 1


def test_the_module_runs_as_a_program(folder: Path) -> None:
    result = run(sys.executable, "-m", "lightning_fedssl", "fit", "--config", "run.yaml", "--trainer.max_round", "3")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "error: there is no option --trainer.max_round; did you mean --trainer.max_rounds?"
    ]


SCRIPT = Path(sys.executable).parent / "lightning-fedssl"


@pytest.mark.parametrize(
    ("asked", "keys"),
    [
        (["--model", "SemiFL", "--model.schedule.help", "Cosine"], "--model.schedule.final"),
        (["--model=SemiFL", "--model.init_args.schedule.help=Cosine"], "--model.init_args.schedule.final"),
        (["--data.partition.help", "Dirichlet"], "--data.partition.alpha"),
        (["--model.help", "SemiFL"], "--model.threshold"),
    ],
)
def test_the_help_of_a_class_has_its_keys_as_they_are_typed(
    capsys: pytest.CaptureFixture[str], asked: list[str], keys: str
) -> None:
    with pytest.raises(SystemExit):
        main(["fit", *asked])
    lines = capsys.readouterr().out.splitlines()
    group = keys.rpartition(".")[0]
    options = [line.strip() for line in lines if line.startswith("  --")]
    assert any(line.startswith(f"{keys} ") for line in options)
    assert all(line.startswith(f"{group}.") for line in options)


def test_the_help_of_a_command_teaches_the_keys(folder: Path) -> None:
    process = start("fit", "--help", folder=folder)
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    for words in (
        "--trainer.clients_per_round",
        "Clients drawn in a round",
        "--data.num_labels",
        "FEDSSL_FIT__TRAINER",
    ):
        assert words in printed
    assert printed.count("--trainer.clients_per_round") == 1
    assert printed.startswith("usage: lightning-fedssl fit [--config FILE]... [--KEY VALUE]...\n")


def test_the_help_of_a_method_is_short(folder: Path) -> None:
    """The network may be any of 700 modules, of which the help names those of this package."""
    process = start("fit", "--model.help", "SemiFL", folder=folder)
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "lightning_fedssl.ResNet9" in printed
    assert "torch.optim.SGD" in printed
    assert "torch.nn.ReLU" not in printed
    assert re.search(r"\d+\s+others", printed)
    assert len(printed.splitlines()) < 250


OWN_METHOD = """
from lightning_fedssl import SemiFL

class MyMethod(SemiFL):
    def round(self, federation):
        print("a round of my own method")
        super().round(federation)
"""


@pytest.mark.skipif(not SCRIPT.exists(), reason="the package is not installed in this environment")
def test_the_console_script_finds_a_method_in_the_working_folder(folder: Path) -> None:
    write("mymethod.py", OWN_METHOD)
    write("own.yaml", CONFIG | {"model": {**CONFIG["model"], "class_path": "mymethod.MyMethod"}})
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(SCRIPT), "fit", "--config", "own.yaml", "--trainer.fast_dev_run", "true"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert "a round of my own method" in result.stdout


def test_a_method_that_is_not_in_the_working_folder_is_named(folder: Path) -> None:
    write("own.yaml", CONFIG | {"model": {**CONFIG["model"], "class_path": "nomethod.MyMethod"}})
    process = start("fit", "--config", "own.yaml", folder=folder)
    message = "No module named 'nomethod'; modules are searched in the folder that the command runs in"
    assert message in process.communicate()[1]
    assert process.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [([], 2, "usage: lightning-fedssl"), (["-h"], 0, "fit"), (["--version"], 0, "lightning-fedssl 0.")],
)
def test_the_program_tells_what_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fedssl", *arguments])
    assert __main__.main() == code
    output = capsys.readouterr()
    assert words in output.out + output.err


class _BrokenModule(ModuleType):
    def __init__(self, message: str) -> None:
        super().__init__("lightning_fedssl.cli.entry")
        self.message = message

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(self.message)


def test_a_torchvision_of_another_torch_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fedssl", "fit"])
    monkeypatch.setitem(
        sys.modules, "lightning_fedssl.cli.entry", _BrokenModule("operator torchvision::nms does not exist")
    )
    assert __main__.main() == 1
    assert "install a matched pair" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "lightning_fedssl.cli.entry", _BrokenModule("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        __main__.main()


@pytest.mark.parametrize("config", ["fedavg_digits.yaml", "fedshvr_digits.yaml"])
def test_clients_train_together_when_the_command_line_asks_for_it(
    folder: Path, config: str, caplog: pytest.LogCaptureFixture
) -> None:
    brief = ["--trainer.max_rounds=1", "--trainer.logger=false", "--trainer.default_root_dir=runs"]
    cli = FederatedCLI(args=["fit", "--config", config, "--trainer.clients_at_once=5", *brief])
    trainer: Any = cli.trainer
    assert trainer.local_training._chosen == 5
    assert not any("one after another" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("environment", "speaks"),
    [
        ({}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"SLURM_LOCALID": "0"}, True),
        ({"SLURM_LOCALID": "1"}, False),
        ({"SLURM_LOCALID": "0", "LOCAL_RANK": "1"}, False),  # started by Lightning, from a shell of SLURM's
    ],
)
def test_one_process_of_a_machine_tells_of_errors(
    folder: Path,
    environment: dict[str, str],
    speaks: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["partition", "--config", "run.yaml", "--data.num_clients", "0"]) == 1
    assert ("num_clients" in capsys.readouterr().err) == speaks


def test_a_timer_can_be_written_into_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """The default of its argument ``interval`` is no plain value."""
    text = printed(capsys, "--config", "semifl_digits.yaml", "--trainer.callbacks=[Timer]")
    (timer,) = yaml.safe_load(text)["trainer"]["callbacks"]
    assert timer["init_args"]["interval"] == "step"
