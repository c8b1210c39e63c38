"""Completion at the tab key, by real shells, and the keys that it and the quick refusal know."""

from __future__ import annotations

import importlib
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

from lightning_fedssl import __main__
from lightning_fedssl.cli import completion
from lightning_fedssl.cli.config_files import package_files
from lightning_fedssl.cli.config_sources import group_files
from lightning_fedssl.cli.entry import FederatedCLI
from lightning_fedssl.cli.keys import as_typed, keys_of_runs, keys_of_script, misspelt_key
from lightning_fedssl.cli.signatures import arguments_of
from lightning_fedssl.data.datamodule import FederatedDataModule

PER_CLASS = "trainer.callbacks: PseudoLabelQuality takes no per_clas; did you mean per_class?"
OPTIMISER = "model: SemiFL takes no optimiser; did you mean optimizer?"
OF_SEMIFL = "model: SemiFL takes no treshold; did you mean {}?"
WIDTH = "model.network: CNN takes no widht; did you mean width?"
LINES = [
    ("lightning-fedssl par", {"partition", "partitions"}),
    ("lightning-fedssl fit --config semifl_dig", {"semifl_digits.yaml"}),
    ("lightning-fedssl test --trainer.max_", {"--trainer.max_rounds"}),
    ("lightning-fedssl fit --model SemiS", {"SemiSFL"}),
    ("lightning-fedssl fit --data.partition Sha", {"Shards"}),
    ("lightning-fedssl compare mni", {"mnist.yaml"}),
    ("lightning-fedssl compare digits.yaml --jo", {"--jobs"}),
    ("lightning-fedssl compare digits.yaml --see", {"--seeds"}),
    ("lightning-fedssl compare digits.yaml --trainer.max_r", {"--trainer.max_rounds"}),
    ("lightning-fedssl partition --data.num_cli", {"--data.num_clients"}),
    ("lightning-fedssl deploy ini", {"init"}),
    ("lightning-fedssl deploy init app --conf", {"--config"}),
    ("lightning-fedssl export --ckpt_path las", {"last"}),
    ("lightning-fedssl completion z", {"zsh"}),
    ("lightning-fedssl repl", {"replay"}),
    ("lightning-fedssl replay --cli", {"--client"}),
    ("lightning-fedssl tune --sec", {"--seconds"}),
    ("lightning-fedssl fit --trainer.availability Un", {"UnevenDropout"}),
]


def complete(shell: str, script: str, line: str) -> set[str]:
    """What the shell's function in a script offers for a line whose last word is being typed."""
    words = " ".join(line.split())
    count = len(line.split())
    # zsh's arrays begin at 1; bashcompinit calls the function with those of ksh, which begin at 0.
    before = "emulate -L ksh\n" if shell == "zsh" else ""
    check = f"""{script}
probe() {{
{before}COMP_WORDS=({words}); COMP_CWORD={count - 1}
_lightning_fedssl
printf '%s\\n' "${{COMPREPLY[@]}}"
}}
probe"""
    command = [shell, "--norc", "-c"] if shell == "bash" else [shell, "-f", "-c"]
    result = subprocess.run([*command, check], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    offered = set(result.stdout.split())
    # zsh's compgen returns all words; its completion system filters them by what has been typed.
    return offered if shell == "bash" else {word for word in offered if word.startswith(line.split()[-1])}


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_shell_completes_commands_keys_and_names(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = completion.script(shell)
    for line, expected in LINES:
        assert complete(shell, script, line) == expected, line


def test_the_script_is_printed_without_slow_imports() -> None:
    code = (
        "import sys, lightning_fedssl.__main__ as m; code = m.main(); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    for shell in completion.SHELLS:
        result = subprocess.run([sys.executable, "-c", code, "completion", shell], capture_output=True, text=True)
        assert (result.returncode, result.stdout) == (0, completion.script(shell))
    result = subprocess.run([sys.executable, "-c", code, "completion", "fish"], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "error: completion needs the name of a shell: lightning-fedssl completion bash, or zsh\n"


def test_the_keys_read_as_text_are_those_of_the_parser() -> None:
    assert set(keys_of_runs()) - {"help"} == set(FederatedCLI.keys_of(FederatedDataModule))
    assert {"suite", "jobs", "any_code", "output", "only", "recorded", "help"} == set(keys_of_script("compare"))
    assert {"ckpt_path", "format", "output"} < set(keys_of_script("export"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.max_round", "3"], "there is no key trainer.max_round; did you mean trainer.max_rounds?"),
        (["--data.num_label=3"], "there is no key data.num_label; did you mean data.num_labels?"),
        (["--trainer.callback+=X"], "there is no key trainer.callback; did you mean trainer.callbacks?"),
        (["--confg", "semifl_digits.yaml"], "there is no key confg; did you mean config?"),
        (["--model", "SemiFL", "--model.treshold", "1"], "model: SemiFL takes no treshold; did you mean threshold?"),
        (["-c", "semifl_digits.yaml", "--model.init_args.optimiser", "1"], OPTIMISER),
        (
            ["-c", "semifl_digits.yaml", "--model.network.widht=8"],
            "model.network: CNN takes no widht; did you mean width?",
        ),
        (["--trainer.callbacks+=PseudoLabelQuality", "--trainer.callbacks.per_clas", "true"], PER_CLASS),
        (["--trainer.callbacks+=PseudoLabelQuality", "--trainer.callbacks.per_class", "true"], None),
        (["--data.partition.help", "Iid", "--data.partition.alpha", "1", "--model.freeze", "x", "--trainer+"], None),
        (["--model", "mymethod.MyMethod", "--model.treshold", "1", "--model.optimizer.momentun", "0"], None),
        (["--data.nothing_like_it", "3"], None),
        (["--config", "no_such.yaml"], None),
    ],
)
def test_a_misspelt_key_is_refused_with_the_key_that_was_meant(arguments: list[str], message: str | None) -> None:
    assert misspelt_key("fit", arguments) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.max_round", "3"], "there is no option --trainer.max_round; did you mean --trainer.max_rounds?"),
        (["--trainer.callback+=X"], "there is no option --trainer.callback; did you mean --trainer.callbacks?"),
        (["--model", "SemiFL", "--model.treshold=1"], OF_SEMIFL.format("--model.threshold")),
        (
            ["--model=SemiFL", "--model.init_args.treshold", "1"],
            OF_SEMIFL.format("--model.init_args.threshold"),
        ),
    ],
)
def test_an_option_is_named_as_it_is_typed(arguments: list[str], message: str) -> None:
    found = misspelt_key("fit", arguments)
    assert found is not None
    assert as_typed(found, arguments) == message
    assert as_typed(found, ["--config", "semifl_digits.yaml"]) == found  # a variable sets it


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {max_round: 3}", "there is no key trainer.max_round; did you mean trainer.max_rounds?"),
        ("data.num_label: 3", "there is no key data.num_label; did you mean data.num_labels?"),
        ("model: {class_path: UDA, init_args: {treshold: 1}}", "model: UDA takes no treshold; did you mean threshold?"),
        ("model.init_args.treshold: 1", "model: SemiFL takes no treshold; did you mean threshold?"),
        ("trainer: {callbacks: [{class_path: PseudoLabelQuality, init_args: {per_clas: true}}]}", PER_CLASS),
        ("trainer: inner.yaml", "there is no key trainer.max_round; did you mean trainer.max_rounds?"),
        ("model: {class_path: own.Method, init_args: {treshold: 1}}", None),
        ("trainer: {callbacks+: [{class_path: ClientHeatMaps, init_args: {every_n_rounds: 1}}]}", None),
        ("a: [", None),
    ],
)
def test_a_misspelt_key_of_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text)
    Path("inner.yaml").write_text("max_round: 3")
    file = "inner.yaml" if "inner" in text else "mine.yaml"
    found = misspelt_key("fit", ["--config", "semifl_digits.yaml", "--config", "mine.yaml"])
    assert found == (message and f"{file}: {message}")


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("compare", ["digits.yaml", "--seed", "[0]"], "there is no key seed; did you mean seeds?"),
        ("compare", ["digits.yaml", "--jobs", "2", "--trainer.max_rounds", "1", "--seeds", "[0]"], None),
        ("partition", ["--plott", "p.png"], "there is no key plott; did you mean plot?"),
        ("export", ["--fromat", "onnx"], "there is no key fromat; did you mean format?"),
        ("replay", ["--roun", "3"], "there is no key roun; did you mean round?"),
        ("replay", ["--round", "3", "--client", "1"], None),
        ("tune", ["--second", "3"], "there is no key second; did you mean seconds?"),
        ("tune", ["--seconds", "3"], None),
        (
            "deploy",
            ["init", "app", "--data.num_label", "3"],
            "there is no key data.num_label; did you mean data.num_labels?",
        ),
    ],
)
def test_the_keys_of_every_command_are_checked(command: str, arguments: list[str], message: str | None) -> None:
    assert misspelt_key(command, arguments) == message


def test_the_overrides_of_a_suite_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    entry = "{label: a, config: semifl_digits.yaml, overrides: {model.init_args.mix_weigth: 0}}"
    Path("s.yaml").write_text(f"title: t\ngroups:\n  - title: g\n    entries: [{entry}]\n")
    assert misspelt_key("compare", ["s.yaml"]) == "s.yaml: model: SemiFL takes no mix_weigth; did you mean mix_weight?"
    Path("s.yaml").write_text("titel: t\n")
    assert misspelt_key("compare", ["s.yaml"]) == "s.yaml: there is no key titel; did you mean title?"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: &x {a: *x}\n", "an alias (*) refers to a value that contains it"),
        ("a: " + "[" * 30_000 + "]" * 30_000, "nested too deeply"),  # would end PyYAML's loader in C
        ("a0: &a0 [x]" + "".join(f"\na{n}: &a{n} [{f'*a{n - 1}, ' * 9}]" for n in range(1, 9)), "aliases (*) repeat"),
    ],
    ids=["circle", "deep", "bomb"],
)
@pytest.mark.parametrize("command", [["fit", "--config"], ["compare"]])
def test_a_file_is_checked_before_its_keys(
    tmp_path: Path, command: list[str], text: str, words: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["lightning-fedssl", *command, str(file)])
    assert __main__.main() == 2
    assert words in capsys.readouterr().err
    assert misspelt_key(command[0], [*command[1:], str(file)]) is None  # the parser refuses the file


def test_a_group_s_file_is_found_beside_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("sub/a.yaml").write_text("data: d.yaml\n")
    Path("sub/d.yaml").write_text("num_client: 7\n")
    arguments = ["--config", "sub/a.yaml"]
    assert misspelt_key("fit", arguments) == (
        "sub/d.yaml: there is no key data.num_client; did you mean data.num_clients?"
    )
    assert list(group_files(arguments)) == [Path("sub/d.yaml")]


def test_a_suite_with_a_number_as_key_has_no_misspelt_key(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("1: 2\n")
    assert misspelt_key("compare", [str(tmp_path / "s.yaml")]) is None


def test_a_misspelt_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSSL_FIT__TRAINER__MAX_ROUND", "3")
    expected = "FEDSSL_FIT__TRAINER__MAX_ROUND: there is no key trainer.max_round; did you mean trainer.max_rounds?"
    assert misspelt_key("fit", ["--config", "semifl_digits.yaml"]) == expected
    assert misspelt_key("test", ["--config", "semifl_digits.yaml"]) is None


@pytest.mark.parametrize(
    ("command", "variable", "words"),
    [
        ("fit", "FEDSSL_FIT__TRAINR__MAX_ROUNDS", "did you mean FEDSSL_FIT__TRAINER__MAX_ROUNDS?"),
        ("fit", "FEDSSL_FIT_TRAINER_MAX_ROUNDS", "did you mean FEDSSL_FIT__TRAINER__MAX_ROUNDS?"),
        ("fit", "FEDSSL_FIT__TRAINER__ZZZZ", "give FEDSSL_FIT__ and the key in capitals, with two"),
        ("compare", "FEDSSL_COMPARE_JOBS", "did you mean FEDSSL_COMPARE__JOBS?"),
        ("export", "FEDSSL_EXPORT__FORMATS__X", "did you mean FEDSSL_EXPORT__FORMAT?"),
        ("test", "FEDSSL_FIT__TRAINR__MAX_ROUNDS", ""),
        ("fit", "FEDSSL_TRACE", ""),
        ("fit", "FEDSSL_FIT__MODEL__NETWORK__OWN_ARGUMENT", ""),
        ("fit", "FEDSSL_FIT__DATA__PARTITION__INIT_ARGS__ALPHA", ""),
        ("fit", "FEDSSL_FIT__CKPT_PATH", ""),
        ("replay", "FEDSSL_REPLAY__ROUND", ""),
        ("partition", "FEDSSL_PARTITION__OUTPUT", ""),
        ("compare", "FEDSSL_COMPARE__SEEDS", ""),
    ],
)
def test_a_variable_without_key_is_refused(
    command: str, variable: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "3")
    message = misspelt_key(command, [])
    assert (message or "").startswith(f"{variable}: there is no such variable; {words}" if words else "")
    assert (message is None) == (not words)


def test_no_configuration_or_suite_of_the_package_is_refused() -> None:
    for name in package_files():
        suite = name.startswith("suites/")
        assert misspelt_key("compare" if suite else "fit", [name] if suite else ["--config", name]) is None, name


@pytest.mark.parametrize("part", ["algorithms", "models", "data", "callbacks"])
def test_arguments_read_as_text_are_those_of_the_classes(part: str) -> None:
    """A class takes what the text says and no more: otherwise a key that exists could be refused."""
    module = importlib.import_module(f"lightning_fedssl.{part}")
    classes = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__.startswith("lightning_fedssl")]
    assert len(classes) > 8
    for owner in classes:
        found = arguments_of(owner.__name__)
        if found:
            parser = ArgumentParser(exit_on_error=False)
            assert set(parser.add_class_arguments(owner, fail_untyped=False)) <= set(found), owner.__name__
