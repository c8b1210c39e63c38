"""Fed-SHVR's Table I on MNIST: one run per cell and seed; each result is appended to a CSV when its run ends.

A run that is in the CSV is not repeated, so the script can be stopped and started again. With ``--keep``, a stopped run
resumes from its last checkpoint in that folder. At its end the script prints the table in Markdown. With ``--every``,
the accuracy of every n-th round is written to a second file, for figures.

    OMP_NUM_THREADS=1 python benchmarks/fed_shvr_table1.py --root data --rounds 1 --seeds 5
    OMP_NUM_THREADS=1 python benchmarks/fed_shvr_table1.py --root data --rounds 1 --seeds 5 --variant step
    OMP_NUM_THREADS=1 python benchmarks/fed_shvr_table1.py --rounds 100 --hidden 500 --every 5 --keep runs/table1
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import command_line
from command_line import RESULTS, ROOT
from watch import Watch, add_row, rows

ALPHAS = (("0", "0"), ("0.75", "0"), ("0", "0.1"), ("0.75", "0.1"))
"""alpha_1 and alpha_2 of the rows of Table I."""

PAPER: dict[str, tuple[float, float, float, float]] = {
    "fedavg 600": (58.5, 88.0, 37.8, 87.5),
    "fedavg 60000": (94.4, 98.5, 94.3, 98.4),
    "fedshvr 0 0": (81.4, 92.5, 34.7, 92.4),
    "fedshvr 0.75 0": (83.5, 92.7, 74.4, 92.7),
    "fedshvr 0 0.1": (83.1, 95.2, 72.9, 95.4),
    "fedshvr 0.75 0.1": (83.6, 96.6, 82.2, 95.5),
}
"""Published test accuracies in per cent: IID after 1 and 100 rounds, not IID after 1 and 100."""

FURTHER = ("fedavg 600 3steps", "fedavg 600 tau")
"""FedAvg on 600 labels with 3 steps, E N_k / B rounded down, and with as many steps as Fed-SHVR makes."""

OTHERS = {
    "fedpseudo": ("pseudolabel", ()),
    "fedmt": ("meanteacher", ()),
    "fedsh 0.75 0.1": ("fedshvr", ("control_variate=false",)),
    "fedsvr 0.75 0.1": ("fedshvr", ("averaging=plain",)),
}
"""Baselines and ablations of the paper's figures, which have no number in Table I: configuration and options."""

SUPERVISED_ONLY = ("alpha0=0", "alpha2=0", "control_variate=false", "averaging=plain")
"""Options that turn Fed-SHVR into federated averaging on the labels with Fed-SHVR's numbers of steps tau_k."""

VARIANTS = {
    "default": ("ramp_epochs=50", "label_alpha0=final", "r2=from_uniform"),
    "printed": ("ramp_epochs=50", "label_alpha0=final", "r2=to_uniform"),
    "literal": ("ramp_epochs=50", "label_alpha0=ramped", "r2=to_uniform"),
}
"""*default*: the final alpha_0 in Eq. 8, and r_2 = KL(uniform, f); *printed*: Eq. 9's KL(f, uniform) instead;
*literal*: the alpha_0 of the round in Eq. 8, too. The result file also has rows of *step*, in which the current model
labelled each batch, with a ramp over the steps of the first round; it was worse in all cells and was removed."""

KEY = ("cell", "split", "reading", "hidden", "images", "rounds", "seed")
COLUMNS = (*KEY, "accuracy", "loss", "cpu_s")


def main(given: Sequence[str] | None = None) -> None:
    """Run the cells that the CSV does not have, then print the table."""
    arguments = _parser().parse_args(given)
    label = ", ".join([arguments.variant, *arguments.vary])
    for seed in range(arguments.first_seed, arguments.seeds):
        for split in arguments.splits:
            for cell in arguments.cells:
                sizes = (arguments.hidden, arguments.images, arguments.rounds, seed)
                key = [cell, split, variant_of(cell, label), *map(str, sizes)]
                if tuple(key) not in {tuple(row[name] for name in KEY) for row in rows(arguments.csv)}:
                    row = [*key, *run(key, arguments)]
                    add_row(arguments.csv, COLUMNS, row)
                    print(*row, flush=True)
    print("\n".join(table(rows(arguments.csv), arguments, label)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="the data folder, with MNIST in it")
    parser.add_argument("--rounds", type=int, default=1, help="T")
    parser.add_argument("--seeds", type=int, default=5, help="one more than the last seed")
    parser.add_argument("--first-seed", type=int, default=0, help="the first seed")
    parser.add_argument("--hidden", type=int, default=5000, help="width of the hidden layer; the paper's is 5000")
    parser.add_argument("--images", type=int, default=60000, help="training images, 600 of them labelled")
    parser.add_argument(
        "--variant", "--reading", dest="variant", choices=VARIANTS, default="default", help="variant of Fed-SHVR"
    )
    parser.add_argument(
        "--vary",
        nargs="*",
        default=[],
        help="changed options: of Fed-SHVR (alpha0=3) or of all methods (data.weak=crop)",
    )
    parser.add_argument("--cells", nargs="*", default=[*PAPER, *FURTHER], help="rows of the table, or other methods")
    parser.add_argument("--splits", nargs="*", default=["iid", "noniid"], help="columns of the table")
    parser.add_argument("--every", type=int, default=0, help="also test after every n-th round; 0: only after the last")
    parser.add_argument("--keep", type=Path, help="folder for checkpoints, from which a stopped run resumes")
    parser.add_argument("--csv", type=Path, default=RESULTS / "fed_shvr_table1.csv", help="file of the results")
    parser.add_argument("--curves", type=Path, default=RESULTS / "fed_shvr_curves.csv", help="file of --every")
    return parser


def variant_of(cell: str, label: str) -> str:
    """The variant and the changed options that a cell depends on; methods without pseudo-labels have no variant."""
    variant, *varied = label.split(", ")
    if not cell.startswith(("fedshvr", "fedsh ", "fedsvr")):
        return ", ".join(["-", *filter(_for_all, varied)])
    without_r2 = variant == "printed" and cell.endswith(" 0")
    return ", ".join(["default" if without_r2 else variant, *varied])


def options(cell: str, split: str, variant: str, vary: Sequence[str] = ()) -> tuple[str, list[str]]:
    """The configuration of a cell, and its options."""
    method, *rest = cell.split()
    common = [_option(text) for text in vary if _for_all(text)]
    if method == "fedavg" and "tau" not in rest:
        steps = ["--model.client_epochs=1.5"] if "3steps" in rest else []
        return f"fedavg_mnist_{rest[0]}_{split}.yaml", steps + common
    config, changed = OTHERS.get(cell, ("fedshvr", SUPERVISED_ONLY if method == "fedavg" else ()))
    if config != "fedshvr":
        return f"{config}_mnist_{split}.yaml", common
    alpha1, alpha2 = ("0.75", "0.1") if method == "fedavg" else rest
    everything = [f"alpha1={alpha1}", f"alpha2={alpha2}", *VARIANTS[variant], *vary, *changed]
    return f"fedshvr_mnist_{split}.yaml", [_option(text) for text in everything]


def _for_all(text: str) -> bool:
    """Whether a changed option is one of the data or the trainer, which apply to every method."""
    return text.startswith(("data.", "trainer."))


def _option(text: str) -> str:
    return f"--{text}" if _for_all(text) else f"--model.{text}"


def run(key: Sequence[str], arguments: argparse.Namespace) -> list[str]:
    """Accuracy in per cent, loss and CPU seconds of one run, including the CPU seconds before an interruption.

    Args:
        key: The first columns of its row.
        arguments: The command line.

    Raises:
        SystemExit: A signal stops the run; with ``--keep``, the same command resumes it.
    """
    from lightning.pytorch.trainer.states import TrainerStatus

    from lightning_fedssl.cli import FederatedCLI

    folder = tempfile.mkdtemp() if arguments.keep is None else str(arguments.keep / "_".join(key).replace(" ", "_"))
    config, changes = options(key[0], key[1], arguments.variant, arguments.vary)
    given = [f"--config={ROOT / 'configs' / config}", *settings(key, folder, arguments), *changes]
    sys.argv = sys.argv[:1]
    resumed = ["--ckpt_path=last"] if Path(folder, "checkpoints", "last.ckpt").is_file() else []
    trainer: Any = FederatedCLI(args=["fit", *given, *resumed]).trainer
    if trainer.state.status == TrainerStatus.INTERRUPTED:
        raise SystemExit(f"stopped after round {trainer.round_index}")
    shutil.rmtree(folder)
    gc.collect()  # free the memory of the previous cell, whose trainer and algorithm refer to each other
    metrics = trainer.callback_metrics
    (watch,) = (callback for callback in trainer.callbacks if isinstance(callback, Watch))
    accuracy, loss = 100 * float(metrics["test/accuracy"]), float(metrics["test/loss"])
    return [f"{accuracy:.2f}", f"{loss:.4f}", f"{watch.seconds():.0f}"]


def settings(key: Sequence[str], folder: str, arguments: argparse.Namespace) -> list[str]:
    """The options of every cell's run."""
    names = dict(zip(KEY, key, strict=True))
    watched = {name: value for name, value in names.items() if name != "rounds"}
    callbacks = [
        {"class_path": "FederatedCheckpoint", "init_args": {"every_n_rounds": 5 if arguments.keep else 1000}},
        {"class_path": "watch.Watch", "init_args": {"path": str(arguments.curves), "key": watched}},
    ]
    chosen = {
        "trainer.callbacks": json.dumps(callbacks),
        "trainer.default_root_dir": folder,
        "seed_everything": names["seed"],
        "data.root": arguments.root,
        "data.max_train_images": names["images"],
        "data.validation": "test" if arguments.every else 0,
        "trainer.check_val_every_n_rounds": arguments.every or 1,
        "trainer.max_rounds": names["rounds"],
        "trainer.logger": "false",
        "trainer.enable_progress_bar": "false",
        "model.network.hidden": f"[{names['hidden']}]",
    }
    return [f"--{name}={value}" for name, value in chosen.items()]


def table(results: list[dict[str, str]], arguments: argparse.Namespace, label: str) -> list[str]:
    """Mean, population standard deviation and number of seeds of each cell next to the paper's numbers."""
    sizes = tuple(map(str, (arguments.hidden, arguments.images, arguments.rounds)))
    lines = ["| cell | IID | paper | not IID | paper |", "|---|---|---|---|---|"]
    for cell in [*PAPER, *FURTHER, *OTHERS]:
        texts = []
        for column, split in enumerate(("iid", "noniid")):
            wanted = (cell, split, variant_of(cell, label), *sizes)
            found = [float(r["accuracy"]) for r in results if tuple(r[name] for name in KEY[:-1]) == wanted]
            mean = f"{statistics.mean(found):.1f} ± {statistics.pstdev(found):.1f} ({len(found)})" if found else "-"
            index = 2 * column + (arguments.rounds == 100)
            published = f"{PAPER[cell][index]}" if cell in PAPER and arguments.rounds in (1, 100) else "-"
            texts += [mean, published]
        lines.append(f"| {cell} | {' | '.join(texts)} |")
    return [*lines, "", f"{command_line.machine()}."]


if __name__ == "__main__":
    main()
