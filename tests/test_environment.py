"""Keys of methods, partitions and other classes from environment variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from lightning_fedssl.cli import compare
from lightning_fedssl.cli.entry import main
from lightning_fedssl.cli.environment import with_environment, without_effect
from lightning_fedssl.comparison.suite import SuiteEntry

FIT = ["fit", "--config", "semifl_digits.yaml"]


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({"FEDSSL_FIT__MODEL__FREEZE": "convs"}, ["--model.freeze=convs"]),
        ({"FEDSSL_FIT__MODEL__INIT_FROM": "a b.pt"}, ["--model.init_from=a b.pt"]),
        ({"FEDSSL_FIT__MODEL__OPTIMIZER__DAMPENING": "0.1"}, ["--model.optimizer.dampening=0.1"]),
        ({"FEDSSL_FIT__DATA__PARTITION__DROP_REMAINDER": "false"}, ["--data.partition.drop_remainder=false"]),
        ({"FEDSSL_FIT__MODEL__OPTIMIZER__LR": "1"}, []),  # the file sets it
        ({"FEDSSL_FIT__MODEL__CLIENT_EPOCHS": "1"}, []),
        ({"FEDSSL_FIT__MODEL__INIT_ARGS__CLIENT_EPOCHS": "1"}, []),
        ({"FEDSSL_FIT__MODEL__INIT_ARGS__FREEZE": "convs"}, ["--model.freeze=convs"]),
        ({"FEDSSL_FIT__TRAINER__MAX_ROUNDS": "1", "FEDSSL_FIT__MODEL": "x", "FEDSSL_TEST__MODEL__FREEZE": "x"}, []),
    ],
)
def test_variables_of_keys_of_classes_become_options_at_the_end(variables: dict[str, str], options: list[str]) -> None:
    assert with_environment([*FIT, "--trainer.max_rounds=2"], variables) == [*FIT, "--trainer.max_rounds=2", *options]
    joined = ["fit", "--config=semifl_digits.yaml"]
    assert with_environment(joined, variables) == [*joined, *options]


def test_the_method_comes_first_and_its_arguments_last() -> None:
    variables = {"FEDSSL_FIT__MODEL": "SemiFL", "FEDSSL_FIT__MODEL__NETWORK": "MLP"}
    expanded = ["fit", "--model=SemiFL", "--data.num_clients", "3", "--model.network=MLP"]
    assert with_environment(["fit", "--data.num_clients", "3"], variables) == expanded
    assert with_environment(["fit", "--model", "FedAvg"], variables) == [
        "fit",
        "--model",
        "FedAvg",
        "--model.network=MLP",
    ]
    assert with_environment(FIT, variables) == FIT


def test_a_method_from_the_environment_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSSL_FIT__MODEL", "FedAvg")
    monkeypatch.setenv("FEDSSL_FIT__TRAINER__MAX_ROUNDS", "1")
    monkeypatch.setenv("FEDSSL_FIT__TRAINER__CLIENTS_PER_ROUND", "1")
    options = ["--data.label_location", "clients", "--data.num_clients", "2", "--data.max_train_images", "40"]
    assert main(["fit", "--model.network", "MLP", *options, "--data.num_labels", "all"]) == 0
    assert os.environ["FEDSSL_FIT__MODEL"] == "FedAvg"
    saved = yaml.safe_load(Path("lightning_logs/version_0/config.yaml").read_text())
    assert saved["model"]["class_path"] == "lightning_fedssl.FedAvg"


def test_a_file_with_dotted_keys_has_precedence_too(tmp_path: Path) -> None:
    file = tmp_path / "dots.yaml"
    file.write_text("model.network: MLP\nmodel.init_args.freeze: [convs]\ndata: {partition.alpha: 0.3}\n")
    variables = {
        "FEDSSL_FIT__MODEL__NETWORK": "CNN", "FEDSSL_FIT__MODEL__FREEZE": "x", "FEDSSL_FIT__DATA__PARTITION__ALPHA": "1"
    }  # fmt: skip
    given = ["fit", "--config", str(file)]
    assert with_environment(given, variables) == given


@pytest.mark.parametrize("option", ["--model.freeze", "--model.init_args.freeze"])
def test_an_option_has_precedence_over_the_variable_of_its_key(option: str) -> None:
    given = [*FIT, option, "norms"]
    assert with_environment(given, {"FEDSSL_FIT__MODEL__FREEZE": "convs"}) == given
    assert with_environment([*FIT, f"{option}=norms"], {"FEDSSL_FIT__MODEL__FREEZE": "convs"})[-1] == f"{option}=norms"


def test_a_variable_whose_key_a_file_sets_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FEDSSL_PARTITION__DATA__NUM_CLIENTS", "4")
    monkeypatch.setenv("FEDSSL_PARTITION__DATA__EVAL_BATCH_SIZE", "8")  # the file does not set it
    assert main(["partition", "--config", "semifl_digits.yaml"]) == 0
    assert caplog.messages == [
        "FEDSSL_PARTITION__DATA__NUM_CLIENTS has no effect: semifl_digits.yaml sets data.num_clients; "
        "give --data.num_clients 4"
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "semifl_digits.yaml sets model.client_epochs; give --model.client_epochs 1"),
        (["--model.client_epochs", "2"], ""),
        (["--model.init_args.client_epochs=2"], ""),
    ],
)
def test_a_variable_without_effect_is_not_named_beside_an_option(options: list[str], words: str) -> None:
    messages = without_effect([*FIT, *options], {"FEDSSL_FIT__MODEL__CLIENT_EPOCHS": "1", "FEDSSL_FIT__JSON": "true"})
    assert [words in message for message in messages] == [True] * bool(words)


def test_partition_reads_variables_of_the_class_that_an_option_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDSSL_PARTITION__DATA__NUM_CLIENTS", "4")
    monkeypatch.setenv("FEDSSL_PARTITION__DATA__PARTITION__ALPHA", "0.25")
    assert main(["partition", "--data.partition", "Dirichlet", "--data.num_labels", "50"]) == 0
    printed = capsys.readouterr().out
    assert "alpha=0.25" in printed
    assert "client 3" in printed
    assert "client 4" not in printed


def test_compare_reads_variables_of_its_own_keys_and_of_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file sets clients_per_round, so its variable has no effect; the other two are set by no file."""
    monkeypatch.setenv("FEDSSL_COMPARE__JOBS", "3")
    monkeypatch.setenv("FEDSSL_COMPARE__TRAINER__CLIENTS_PER_ROUND", "1")
    monkeypatch.setenv("FEDSSL_COMPARE__TRAINER__CHECK_VAL_EVERY_N_ROUNDS", "7")
    monkeypatch.setenv("FEDSSL_COMPARE__MODEL__FREEZE", "convs")
    assert compare.parser().parse_args(["--suite", "digits.yaml"]).jobs == 3
    config = compare.resolve(SuiteEntry("SemiFL", "semifl_digits.yaml"), []).config
    assert config["trainer"]["clients_per_round"] == 10
    assert config["trainer"]["check_val_every_n_rounds"] == 7
    assert config["model"]["init_args"]["freeze"] == "convs"


def test_the_method_gets_the_variable_and_the_command_line_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSSL_FIT__MODEL__FREEZE", "[convs, norms]")
    with pytest.raises(SystemExit):
        main([*FIT, "--print_config"])
    assert "    freeze:\n    - convs\n    - norms\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*FIT, "--model.freeze=classifier", "--print_config"])
    assert "    freeze: classifier\n" in capsys.readouterr().out
    monkeypatch.setenv("FEDSSL_FIT__MODEL__FREEZ", "convs")
    with pytest.raises(SystemExit):
        main([*FIT, "--print_config"])
    assert "freez" in capsys.readouterr().err
