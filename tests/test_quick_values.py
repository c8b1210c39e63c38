"""Values of a wrong type are refused without slow imports, with the message that the parser would print."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_fedssl.cli.entry import FederatedCLI
from lightning_fedssl.cli.values import wrong_value

DIGITS = ["--config", "semifl_digits.yaml"]
WRONG = {
    "trainer.max_rounds": "abc",
    "trainer.clients_at_once": "many",
    "trainer.precision": "bf17",
    "trainer.channels_last": "1.5",
    "trainer.quarantine": "auto",
    "data.num_labels": "a few",
    "data.validation": "[1]",
    "model.threshold": "high",
    "model.server_view": "stong",
}
"""Values that no type of the argument accepts, one for each kind of type."""
ACCEPTED = {
    "trainer.max_rounds": ["3", "null", "~"],
    "trainer.clients_at_once": ["auto", "5"],
    "trainer.quarantine": ["null", ".inf", "1e-3"],
    "data.num_labels": ["all", "-1"],
    "data.root": ["", "3", "null"],
    "data.dataset": ["nothing"],
    "model.threshold": ["1", ".nan"],
    "model.network": ["nothing"],
    "model.nothing": ["nothing"],
}
"""Values that the parser accepts, or refuses for reasons that are not checked here."""


def message_of_the_parser(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        FederatedCLI(args=["fit", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1].removeprefix("error: ")


@pytest.mark.parametrize("key", WRONG)
def test_the_message_is_that_of_the_parser(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*DIGITS, f"--{key}={WRONG[key]}"]
    message = wrong_value("fit", arguments)
    assert message is not None
    assert message.startswith(f"{key}: expected ")
    assert message == message_of_the_parser(arguments, capsys)


@pytest.mark.parametrize("key", ["trainer.max_rounds", "data.validation", "model.server_view"])
def test_a_value_of_a_file_is_refused_with_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(f"{key.replace('model.', 'model.init_args.')}: {WRONG[key]}\n")
    arguments = [*DIGITS, "--config", "mine.yaml", f"--{key}", "1"]  # that an option replaces it is no excuse
    message = wrong_value("fit", arguments)
    assert message is not None
    assert message.startswith(f"mine.yaml: {key}: expected ")
    assert message == message_of_the_parser(arguments, capsys)


def test_a_value_of_a_variable_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSSL_FIT__TRAINER__MAX_ROUNDS", "abc")
    expected = "FEDSSL_FIT__TRAINER__MAX_ROUNDS: trainer.max_rounds: expected a whole number, got abc"
    assert wrong_value("fit", DIGITS) == expected


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ACCEPTED.items() for value in values])
def test_other_values_are_left_to_the_parser(key: str, value: str) -> None:
    assert wrong_value("fit", [*DIGITS, f"--{key}={value}"]) is None


def test_an_option_without_a_value_is_left_to_the_parser() -> None:
    assert wrong_value("fit", [*DIGITS, "--trainer.max_rounds"]) is None
    assert wrong_value("fit", [*DIGITS, "--trainer.max_rounds", "--trainer.devices", "1"]) is None


def test_the_configurations_of_the_package_are_accepted() -> None:
    files = sorted(Path(__file__).parent.parent.joinpath("configs").glob("*.yaml"))
    assert len(files) > 50
    assert {file.name: wrong_value("fit", ["--config", str(file)]) for file in files} == dict.fromkeys(
        file.name for file in files
    )
