"""Rounds of SemiFL's published code, from a checkout that you provide.

    git clone https://github.com/diaoenmao/SemiFL-Semi-Supervised-Federated-Learning-for-Unlabeled-Clients-with-Alternate-Training semifl-code
    git -C semifl-code checkout 4ec3663
    python benchmarks/peers/semifl_authors.py --code semifl-code --steps

The authors' main program runs with its own options; no file of it is changed or copied. Set from outside are the size
of the network (WideResNet-10-1 instead of 28-2), the images (``semifl_setting.py``) and a pause before each round. Its
output is discarded, and it writes its files into a temporary folder. It needs the packages in ``requirements.txt``.
``--steps`` prints the training steps of the first round, and ends; it fails if they are not as many as ours.
"""  # noqa: E501 (the address)

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from unittest import mock

import semifl_setting as setting
import torch
from pacer import Pacer

CLASSES = [f"class {number}" for number in range(10)]
CONTROL = (
    f"{setting.LABELS}_fix@0-mix_{setting.CLIENTS}_{setting.COHORT / setting.CLIENTS}_iid_"
    f"{setting.EPOCHS}-{setting.EPOCHS}_{setting.SERVER_MOMENTUM}_1_1"
)
"""Labels, threshold, clients, share of a round, partition, epochs, server momentum, sBN on all images, fine-tuning."""


def import_program(code: Path) -> Any:
    """The authors' main program as a module; it reads its configuration from the current folder."""
    source = code / "src"
    if not (source / "train_classifier_ssfl.py").is_file():
        raise SystemExit(f"--code {code}: there is no src/train_classifier_ssfl.py; see the head of this file")
    os.chdir(source)
    sys.path.insert(0, str(source))
    sys.argv = [sys.argv[0], "--control_name", CONTROL, "--device", "cpu"]
    return importlib.import_module("train_classifier_ssfl")


def write_images() -> None:
    """Write the images as that code stores CIFAR-10, into the current folder."""
    trees, save = importlib.import_module("datasets.utils"), importlib.import_module("utils").save
    pixels, labels = setting.images()
    rows, tree = pixels.transpose(0, 2, 3, 1), importlib.import_module("anytree").Node("U", index=[])
    for name in CLASSES:
        trees.make_tree(tree, [name])
    parts = {"train": slice(-setting.TEST_IMAGES), "test": slice(-setting.TEST_IMAGES, None)}
    for name, part in parts.items():
        stored = (list(range(len(rows[part]))), rows[part], labels[part].tolist())
        save(stored, f"data/CIFAR10/processed/{name}.pt", mode="pickle")
    save((tree, trees.make_flat_index(tree)), "data/CIFAR10/processed/meta.pt", mode="pickle")


def remember_losses(program: Any) -> list[float]:
    """The losses on the test images after each round, NaN before the first; the list grows while the program runs."""
    losses, test = [float("nan")], program.test

    def test_and_remember(data_loader: Any, model: Any, metric: Any, logger: Any, epoch: int) -> None:
        test(data_loader, model, metric, logger, epoch)
        losses.append(float(logger.mean["test/Loss"]))

    program.test = test_and_remember
    return losses


def steps_printer(output: IO[str]) -> Callable[[], None]:
    """A pause that prints the number of training steps since the first pause, and ends the program at the second."""
    # The code clips the gradient once in each step of a client and of the server.
    clip = mock.patch("torch.nn.utils.clip_grad_norm_", wraps=torch.nn.utils.clip_grad_norm_).start()
    pauses = iter((False, True))

    def pause() -> None:
        if next(pauses):
            print(clip.call_count, file=output, flush=True)
            raise SystemExit(clip.call_count != setting.STEPS)

    return pause


def main() -> None:
    """Run rounds until the benchmark ends the process, or print the steps of a round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", type=Path, required=True, help="checkout of the authors' repository")
    parser.add_argument("--steps", action="store_true", help="print the training steps of the first round, and end")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    program, output = import_program(arguments.code.resolve()), sys.stdout
    losses = remember_losses(program)
    pause = steps_printer(output) if arguments.steps else Pacer(lambda: losses[-1], output).pause
    train_client, process_control = program.train_client, program.process_control

    def train_client_after_a_pause(*given: Any) -> None:
        pause()
        train_client(*given)

    def process_control_with_a_small_network() -> None:
        process_control()
        program.cfg["wresnet28x2"] = {"depth": 10, "widen_factor": 1, "drop_rate": 0.0}

    program.train_client, program.process_control = train_client_after_a_pause, process_control_with_a_small_network
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(open(os.devnull, "w")):
        os.chdir(folder)
        write_images()
        program.main()


if __name__ == "__main__":
    main()
