from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from lightning_fedssl.cli import main
from lightning_fedssl.run import Run
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.trainer import FederatedTrainer, fit_loop
from tests.cli.helpers import CONFIG, SmallData, failure, write

SCRIPT = Path(sys.executable).parent / "lightning-fedssl"
FIT = ["fit", "--config", "run.yaml"]

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


def test_fit_takes_the_configuration_of_the_package_and_options_of_a_file_of_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(FederatedTrainer, "fit", lambda trainer, model, datamodule, **_: asked.append(datamodule))
    assert main(["fit"]) == 0
    assert asked[0].num_labels == 50
    Path("t.csv").write_text("site,x,label\n" + "N,1,a\nS,2,b\n" * 9)
    given = "fit --config presets/table.yaml --data.num_labels 4 --data.dataset t.csv --data.dataset.client_column site"
    monkeypatch.setattr(sys, "argv", ["lightning-fedssl", *given.split()])
    assert main() == 0
    assert type(asked[1].source).__name__ == "Table"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "--help"], ["--trainer.clients_per_round", "Clients drawn in a round", "FEDSSL_FIT__TRAINER"]),
        (["fit", "--data.partition.help", "Dirichlet"], ["alpha"]),
        (["fit", "--model.help", "SemiFL"], ["threshold", "the confidence from which"]),
    ],
)
def test_the_help_names_commands_and_keys(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--help", ["fit", "compare", "methods", "FEDSSL_FIT__"]),
        ("--version", ["lightning-fedssl 0."]),
        ("comapre", ["there is no command comapre; did you mean compare?"]),
    ],
)
def test_help_and_a_mistyped_command_import_neither_pytorch_nor_lightning(argument: str, words: list[str]) -> None:
    code = (
        "import sys; from lightning_fedssl.cli import main; main(sys.argv[1:]); "
        "assert not {'torch', 'lightning'} & {*sys.modules}"
    )
    result = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert all(word in result.stdout + result.stderr for word in words)


def test_ctrl_c_outside_a_round_ends_with_130(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FederatedTrainer, "fit", interrupt)
    assert main(FIT) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_a_round_ends_with_its_code_after_the_round_is_saved(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    def draw_cohort(run: Run, index: int) -> list[int]:
        os.kill(os.getpid(), number)
        return [0, 1]

    monkeypatch.setattr(fit_loop, "draw_cohort", draw_cohort)
    assert main([*FIT, "--trainer.max_rounds", "9", "--trainer.logger", "true"]) == code
    assert checkpoint_file.load(checkpoint_file.find("last", folder))["round"] == 1


def test_a_bug_and_a_wish_keep_the_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSSL_TRACEBACK", "1")
    with pytest.raises(ValueError, match="threshold is 2"):
        main([*FIT, "--model.threshold", "2"])
    monkeypatch.delenv("FEDSSL_TRACEBACK")
    monkeypatch.setattr(FederatedTrainer, "fit", lambda *_, **__: int("no number"))
    with pytest.raises(ValueError, match="no number"):
        main(FIT)


def test_an_error_of_the_machine_names_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = failure(capsys, "partition", "--config", "run.yaml", "--output", "run.yaml")
    assert message.startswith("run.yaml: ")


@pytest.mark.parametrize(
    ("environment", "speaks"), [({}, True), ({"LOCAL_RANK": "1"}, False), ({"SLURM_LOCALID": "1"}, False)]
)
def test_one_process_of_a_machine_prints_errors(
    folder: Path, environment: dict[str, str], speaks: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "SLURM_LOCALID")}
    with mock.patch.dict(os.environ, alone | environment, clear=True):
        assert main(["partition", "--config", "run.yaml", "--data.num_clients", "0"]) == 2
    assert ("num_clients" in capsys.readouterr().err) == speaks


def test_a_data_module_of_ones_own_has_its_own_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", "--data.size", "50"], datamodule_class=SmallData) == 0
    assert "3 clients: 24 images, 8 each" in capsys.readouterr().out
    write("own.yaml", {**CONFIG, "data": {"size": 50}})
    with pytest.raises(SystemExit):
        main(["fit", "--config", "own.yaml", "--data.sise", "3"], datamodule_class=SmallData)
    assert "did you mean data.size?" in capsys.readouterr().err
