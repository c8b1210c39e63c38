"""Keys of methods, partitions and other classes from environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_fedssl.cli.entry import main
from lightning_fedssl.cli.environment import with_environment

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
        ({"FEDSSL_FIT__TRAINER__MAX_ROUNDS": "1", "FEDSSL_FIT__MODEL": "x", "FEDSSL_TEST__MODEL__FREEZE": "x"}, []),
    ],
)
def test_variables_of_keys_of_classes_become_options_behind_the_files(
    variables: dict[str, str], options: list[str]
) -> None:
    assert with_environment([*FIT, "--trainer.max_rounds=2"], variables) == [*FIT, *options, "--trainer.max_rounds=2"]
    joined = ["fit", "--config=semifl_digits.yaml"]
    assert with_environment(joined, variables) == [*joined, *options]


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
