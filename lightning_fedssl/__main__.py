"""``lightning-fedssl`` and ``python -m lightning_fedssl``."""

from __future__ import annotations

import difflib
import gc
import os
import signal
import sys

from lightning_fedssl import __version__
from lightning_fedssl.cli import completion, listing
from lightning_fedssl.cli.config_files import find_config, find_suite
from lightning_fedssl.cli.config_sources import options_of
from lightning_fedssl.cli.keys import COMMANDS, SCRIPTS, as_typed, misspelt_key
from lightning_fedssl.cli.log_output import interrupted
from lightning_fedssl.cli.strict_yaml import check_yaml_file
from lightning_fedssl.cli.values import wrong_value

HELP = """\
usage: lightning-fedssl {fit,validate,test,predict} [--config FILE]... [--KEY VALUE]...
       lightning-fedssl compare SUITE [--KEY VALUE]...
       lightning-fedssl partition [--config FILE]... [--KEY VALUE]...
       lightning-fedssl export [--ckpt_path PATH] [--format FORMAT]
       lightning-fedssl deploy init FOLDER [--config FILE]... [--KEY VALUE]...
       lightning-fedssl new NAME [--folder FOLDER]

Federated semi-supervised learning: simulates a server and many clients with few labels.

commands:
  fit       train a model with a federation, then test it
  validate  evaluate a checkpoint on the validation images
  test      evaluate a checkpoint on the test images
  predict   write a checkpoint's class probabilities for the test images, or for new ones
  compare   run many configurations over seeds on the same partitions; tables and plots
  partition draw the partition of the images, and show it, without training
  export    write a checkpoint's network as safetensors, torch.export, ONNX or a folder for a model hub
  deploy    write a Flower app that trains a configuration on machines of their own
  new       write a method of your own to start from, with a configuration and tests

  methods, configs, suites, datasets, partitions, availability    list what the package comes with, one line each
  completion {bash,zsh}                                           print a script for the tab key

examples:
  lightning-fedssl fit --config semifl_digits.yaml            a configuration that comes with the package
  lightning-fedssl fit --config a.yaml --config b.yaml        files are merged in order
  lightning-fedssl fit --config a.yaml --data.num_clients 50  options win over files
  lightning-fedssl fit --config a.yaml --ckpt_path last       resume the newest run
  lightning-fedssl fit --config a.yaml --print_config         the configuration with every default filled in
  lightning-fedssl compare digits.yaml --jobs 2               a suite that comes with the package
  lightning-fedssl partition --config a.yaml --plot a.png     which client would hold which images
  lightning-fedssl export --config a.yaml --ckpt_path best --format torch_export    a file that needs PyTorch alone

more help:
  lightning-fedssl fit --help                                 all keys of trainer and data
  lightning-fedssl fit --model.help SemiFL                    the keys of a method
  lightning-fedssl fit --data.partition.help Dirichlet        the keys of a class under another key
"""

_INTERRUPTED = 130
_BROKEN_PAIR = "operator torchvision::nms does not exist"


def main() -> int:
    """Run the command line; returns the exit code.

    The help of the whole program is printed without importing Lightning, which takes seconds.
    """
    arguments = sys.argv[1:]
    if arguments in ([], ["-h"], ["--help"]):
        (sys.stdout if arguments else sys.stderr).write(HELP)
        return 0 if arguments else 2
    if arguments == ["--version"]:
        sys.stdout.write(f"lightning-fedssl {__version__}\n")
        return 0
    if arguments[0] in listing.COMMANDS and arguments[1:] in ([], ["-h"], ["--help"]):
        sys.stdout.write(listing.show(arguments[0]))
        return 0
    if arguments[0] == "completion" and arguments[1:] in ([shell] for shell in completion.SHELLS):
        sys.stdout.write(completion.script(arguments[1]))
        return 0
    if problem := _quick_refusal(arguments):
        sys.stderr.write(f"error: {problem}\n")
        return 2
    _find_modules_of_the_working_folder()
    code = _run()
    if code == _INTERRUPTED:  # a second Ctrl-C while Python ends would print a traceback
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def _quick_refusal(arguments: list[str]) -> str | None:
    """The error message for a misspelt command, file or key, found without slow imports; None if none is found."""
    command = arguments[0]
    if command in listing.COMMANDS:
        return f"{command} takes no arguments: leave out {' '.join(arguments[1:])}; {listing.COMMANDS[command][0]}"
    if command == "completion":
        return "completion needs the name of a shell: lightning-fedssl completion bash, or zsh"
    if not command.startswith("-") and command not in (*COMMANDS, *SCRIPTS):
        known = [*COMMANDS, *SCRIPTS, *listing.COMMANDS, "completion"]
        close = difflib.get_close_matches(command, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        return f"there is no command {command}; {hint}"
    named = [(value, find_config) for option, value in options_of(arguments) if option == "config"]
    if command == "compare" and named:
        return f"compare takes a suite, without --config: lightning-fedssl compare {named[0][0] or 'SUITE'}"
    if command == "compare" and arguments[1:] and not arguments[1].startswith("-"):
        named.append((arguments[1], find_suite))
    for name, find in named:
        if not name:
            return "--config needs a value: a file, or a name that lightning-fedssl configs lists"
        try:
            check_yaml_file(find(name))
        except TypeError as error:
            return f"{name}: {error}"
    if "FEDSSL_TRACEBACK" in os.environ:
        return None
    if problem := misspelt_key(command, arguments[1:]):
        return as_typed(problem, arguments[1:])
    return wrong_value(command, arguments[1:]) if command in COMMANDS else None


def _find_modules_of_the_working_folder() -> None:
    """Let ``--model mymethod.MyMethod`` find ``mymethod.py`` in the folder that the command runs in.

    ``python -m`` searches this folder, a console script does not. The folder is searched last, so that a file of the
    user cannot hide a module that torch or Lightning imports.
    """
    folder = os.getcwd()
    if not {"", folder} & set(sys.path):
        sys.path.append(folder)


def _run() -> int:
    """Import the command line and run it.

    Lightning imports torchvision if it is installed. If torchvision was built for another version of torch, this import
    fails in every command, and the message must say so.
    """
    gc.disable()  # garbage collection frees almost nothing during the imports, and costs a sixth of their time
    try:
        from lightning_fedssl.cli.entry import main as run
    except KeyboardInterrupt:
        return interrupted()
    except RuntimeError as error:
        if _BROKEN_PAIR not in str(error):
            raise
        sys.stderr.write(
            "error: the installed torch and torchvision do not match; install a matched pair, "
            "for example the versions in constraints.txt\n"
        )
        return 1
    finally:
        gc.enable()
    return run()


if __name__ == "__main__":
    sys.exit(main())
