"""Completion at the tab key, by real shells, and the keys that it and the quick refusal know."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from lightning_fedssl.cli import completion
from lightning_fedssl.cli.entry import FederatedCLI
from lightning_fedssl.cli.keys import keys_of_runs, keys_of_script, misspelt_key
from lightning_fedssl.data.datamodule import FederatedDataModule

LINES = [
    ("lightning-fedssl par", {"partition", "partitions"}),
    ("lightning-fedssl fit --config semifl_dig", {"semifl_digits.yaml"}),
    ("lightning-fedssl test --trainer.max_", {"--trainer.max_rounds"}),
    ("lightning-fedssl fit --model SemiS", {"SemiSFL"}),
    ("lightning-fedssl fit --data.partition Sha", {"Shards"}),
    ("lightning-fedssl compare mni", {"mnist.yaml"}),
    ("lightning-fedssl compare digits.yaml --jo", {"--jobs"}),
    ("lightning-fedssl export --ckpt_path las", {"last"}),
    ("lightning-fedssl completion z", {"zsh"}),
]


def complete(shell: str, line: str) -> set[str]:
    """What the shell's function offers for a line whose last word is being typed."""
    words = " ".join(line.split())
    count = len(line.split())
    # zsh's arrays begin at 1; bashcompinit calls the function with those of ksh, which begin at 0.
    before = "emulate -L ksh\n" if shell == "zsh" else ""
    check = f"""{completion.script(shell)}
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
    for line, expected in LINES:
        assert complete(shell, line) == expected, line


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
    assert {"suite", "jobs", "any_code", "output", "help"} == set(keys_of_script("compare"))
    assert {"ckpt_path", "format", "output"} < set(keys_of_script("export"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.max_round", "3"], "there is no key trainer.max_round; did you mean trainer.max_rounds?"),
        (["--data.num_label=3"], "there is no key data.num_label; did you mean data.num_labels?"),
        (["--trainer.callback+=X"], "there is no key trainer.callback; did you mean trainer.callbacks?"),
        (["--trainer.callbacks+=X", "--trainer.callbacks.per_class", "true"], None),
        (["--data.partition.help", "Iid", "--data.partition.alpha", "1", "--model.freeze", "x", "--trainer+"], None),
        (["--data.nothing_like_it", "3"], None),
    ],
)
def test_a_misspelt_key_is_refused_with_the_key_that_was_meant(arguments: list[str], message: str | None) -> None:
    assert misspelt_key(arguments) == message
