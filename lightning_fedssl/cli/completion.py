"""``lightning-fedssl completion bash | zsh``: a script for the tab completion of commands, keys and names.

The script holds all words, so that a tab does not start Python. The start file of the shell evaluates it
(``eval "$(lightning-fedssl completion bash)"``), so it follows updates of the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lightning_fedssl.cli import listing
from lightning_fedssl.cli.config_sources import GROUPS
from lightning_fedssl.cli.keys import COMMANDS, SCRIPTS, keys_of_runs, keys_of_script
from lightning_fedssl.cli.signatures import arguments_of

SHELLS = ("bash", "zsh")

_SCRIPT = """\
_lightning_fedssl() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" names="" files=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        names="{commands}"
    else
        case "$previous" in
{values}
            *) case "${{COMP_WORDS[1]}}" in
{keys}
            esac ;;
        esac
    fi
    COMPREPLY=( $(compgen -W "$names" -- "$current") )
    if [ -n "$files" ]; then COMPREPLY+=( $(compgen -f -- "$current") ); fi
}}
complete -o filenames -F _lightning_fedssl lightning-fedssl
"""

_ZSH = """\
(( $+functions[compdef] )) || { autoload -U compinit && compinit -u }
autoload -U bashcompinit && bashcompinit
"""


def script(shell: str) -> str:
    """The completion script of a shell.

    Args:
        shell: One of :data:`SHELLS`.
    """
    commands = (*COMMANDS, *SCRIPTS, *listing.COMMANDS, "completion")
    text = _SCRIPT.format(commands=" ".join(commands), values=_cases(_values(), 12), keys=_cases(_keys(), 16))
    return (_ZSH if shell == "zsh" else "") + text


def _names(kind: str) -> list[str]:
    return [name for name, _ in listing.rows_of(kind)]


def _values() -> Mapping[str, tuple[Iterable[str], bool]]:
    """The possible words after a key or command, and whether file names are possible, too."""
    return {
        "--config|-c": (_names("configs"), True),
        "--ckpt_path": (("last", "best"), True),
        "compare|--suite": (_names("suites"), True),
        "--model|--model.help": (_names("methods"), False),
        "--data.dataset": (_names("datasets"), False),
        "--data.partition|--data.partition.help": (_names("partitions"), False),
        "--trainer.availability|--trainer.availability.help": (_names("availability"), False),
        "--data.label_location": (("server", "clients"), False),
        "--format": (("safetensors", "torch_export", "onnx", "hub"), False),
        "completion": (SHELLS, False),
        "deploy": (("init", "demo", "preload"), False),
        "--data.root|--data.predict_root|--output|--plot|--trainer.default_root_dir": ((), True),
    }


def _keys() -> Mapping[str, tuple[Iterable[str], bool]]:
    """The keys of each command."""
    keys = {command: keys_of_runs(command) for command in COMMANDS}
    keys |= {command: keys_of_script(command) for command in SCRIPTS}
    groups = [key for key in keys_of_runs() if key.partition(".")[0] in GROUPS]
    keys["partition"] += [key for key in groups if key.startswith("data")]
    keys["compare"] += [*(arguments_of("lightning_fedssl.comparison.suite.Suite") or ()), *groups]
    keys["deploy"] += keys["fit"]
    return {command: ((f"--{key}" for key in names), False) for command, names in keys.items()}


def _cases(words: Mapping[str, tuple[Iterable[str], bool]], indent: int) -> str:
    """Branches of a shell's ``case``."""
    return "\n".join(
        f'{" " * indent}{pattern}) names="{" ".join(names)}"{" files=1" if files else ""} ;;'
        for pattern, (names, files) in words.items()
    )
