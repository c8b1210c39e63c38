"""The commands by name, and the help of the program, which needs neither PyTorch nor Lightning."""

from __future__ import annotations

import textwrap

ABOUT = "Federated semi-supervised learning: a server and many clients with few labels."

TRAINER = {
    "fit": "train, then test the last model",
    "validate": "evaluate a checkpoint on the validation images",
    "test": "evaluate a checkpoint on the test images",
    "predict": "write a checkpoint's class probabilities of the test images, or of new ones",
}
"""The commands that run a trainer."""

SCRIPTS = {
    "compare": "run many configurations over seeds on the same partitions; tables and a page",
    "partition": "draw the partition of the images, and show it, without training",
    "export": "write a checkpoint's network as safetensors, torch.export, ONNX or a folder for a "
    "model hub",
    "deploy": "write a Flower app that trains a configuration on machines of their own",
    "new": "write a method of your own to start from, with a configuration and tests",
}
"""The commands that have a module of their own."""

LISTS = {
    "methods": "use: --model NAME; its keys: lightning-fedssl fit --model.help NAME",
    "configs": "use: --config NAME; several are merged in order",
    "suites": "use: lightning-fedssl compare NAME",
    "datasets": "use: --data.dataset NAME; options of a class: --data.dataset.OPTION VALUE",
    "partitions": (
        "use: --data.partition NAME; its keys: lightning-fedssl fit --data.partition.help NAME"
    ),
    "availability": (
        "use: --trainer.faults.availability NAME; keys: lightning-fedssl fit "
        "--trainer.faults.availability.help NAME"
    ),
}
"""The commands that list what the package has, each with a hint how to use a name."""

HABITS = {"train": "fit", "evaluate": "test"}
"""Other programs' names of commands."""

PRECEDENCE = """\
Files and options are applied in their order. Each key can also come from the environment, with the
lowest precedence: FEDSSL_FIT__TRAINER__MAX_ROUNDS is --trainer.max_rounds of fit.
"""


def help_text() -> str:
    """The help of the program: its commands, each in a line."""
    lines = [f"usage: lightning-fedssl COMMAND [--config FILE]... [--KEY VALUE]...\n\n{ABOUT}\n"]
    for name, about in {**TRAINER, **SCRIPTS}.items():
        lines.append(textwrap.fill(f"  {name:10} {about}", 100, subsequent_indent=" " * 13))
    lines.append(f"\nLists of what the package has: {', '.join(LISTS)}.")
    lines.append(f"Each command has a --help; --version prints the version.\n{PRECEDENCE}")
    return "\n".join(lines)
