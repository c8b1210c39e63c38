r"""The papers' tables on small real data, on a CPU: Fed-SHVR's Table I, FedRGD's claims, Semi-SFL with its ablations.

A run is a configuration with overrides, known by the first columns of its row. Its row is appended to the CSV file of
its table in ``benchmarks/results`` when it has ended; a run that is there is not repeated, one that was stopped resumes
from its folder below ``runs/papers``. docs/claims.yaml says what the rows are compared with. ``curves.csv`` has a row
for each round with an accuracy, as it comes: a run that has not ended is compared by it.

    python benchmarks/papers.py fed_shvr --root data --seeds 0 1 2 3 4 --rounds 1
    python benchmarks/papers.py fed_shvr --root data --rounds 100 --set hidden=200 variant=printed --only "fedshvr 0.75 0.1"
    python benchmarks/papers.py readings --root data
    python benchmarks/papers.py fedrgd --root data --only regroup labels
    python benchmarks/papers.py semi_sfl --root data --only "Semi-SFL" "FedSwitch-SL"
    python benchmarks/papers.py semi_sfl --root data --rounds 200 --csv semi_sfl_long.csv --set partition=dir0.1
    python benchmarks/papers.py next --root data --accelerator cuda --minutes 9
"""  # noqa: E501

from __future__ import annotations

import argparse
import csv
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor, nn

from lightning_fedssl import Experiment, FederatedCallback
from lightning_fedssl.comparison.plan import slug
from lightning_fedssl.comparison.results import Row, rounds
from lightning_fedssl.models import Network, ResNet9

RESULTS = Path(__file__).resolve().parent / "results"
SUITES = RESULTS.parent.parent / "configs" / "suites"


class Cell(NamedTuple):
    """A row of a table but for its seed: its first columns, and its configurations."""

    key: dict[str, Any]
    configurations: list[Any]


_STEP = {"label_refresh": "step", "ramp_epochs": 0, "r2": "from_uniform"}
SHVR_VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"ramp_epochs": 50, "label_alpha0": "final", "r2": "from_uniform"},
    "printed": {"ramp_epochs": 50, "label_alpha0": "final", "r2": "to_uniform"},
    "literal": {"ramp_epochs": 50, "label_alpha0": "ramped", "r2": "to_uniform"},
    "step 0.2": {**_STEP, "alpha0": 0.2},
    "step 0.3": {**_STEP, "alpha0": 0.3},
    "step 0.3, labels 0.6": {**_STEP, "alpha0": 0.3},
    **{f"once {a}": {"ramp_epochs": 0, "r2": "from_uniform", "alpha0": a} for a in (0.003, 0.007, 0.02, 0.05)},
}
"""*default*: the final alpha_0 in Eq. 8, and r_2 = KL(uniform, f); *printed*: Eq. 9's KL(f, uniform) instead;
*literal*: the alpha_0 of the round in Eq. 8, too; *step*: labels at every step, with this alpha_0 from the start, or,
for the labels alone, that one; *once*: once a round, with this alpha_0 from the start."""
SHVR_SPLITS: dict[str, dict[str, Any]] = {
    "iid": {},
    "noniid": {},
    "noniid_dir01": {"alpha": 0.1},
    "noniid_amounts": {"draws": "amounts", "alpha": 25.0},
    "noniid_random": {"pairs": "random"},
    "noniid_random_dir01": {"pairs": "random", "alpha": 0.1},
    "noniid_random_amounts": {"pairs": "random", "draws": "amounts", "alpha": 25.0},
}
"""Options of LabeledClasses. The paper's clients take 270 to 500 steps. With a draw per class and alpha 3 they take 275
to 456 (seeds 0 to 2), with *amounts* and alpha 25 224 to 515, with alpha 0.1, as printed, 22 to 1,126."""

_LABELS_ONLY = {"alpha0": 0, "alpha2": 0, "control_variate": False, "averaging": "plain"}
SHVR_CELLS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "fedavg 600": ("fedavg_mnist_600", None),
    "fedavg 60000": ("fedavg_mnist_60000", None),
    **{f"fedshvr {a} {b}": ("fedshvr_mnist", {"alpha1": a, "alpha2": b}) for a in (0, 0.75) for b in (0, 0.1)},
    "fedavg 600 tau": ("fedshvr_mnist", {"alpha1": 0.75, **_LABELS_ONLY}),
    "fedpseudo": ("pseudolabel_mnist", None),
    "fedmt": ("meanteacher_mnist", None),
    "fedsh 0.75 0.1": ("fedshvr_mnist", {"alpha1": 0.75, "alpha2": 0.1, "control_variate": False}),
    "fedsvr 0.75 0.1": ("fedshvr_mnist", {"alpha1": 0.75, "alpha2": 0.1, "averaging": "plain"}),
}
"""The rows of Table I, FedAvg on 600 labels with Fed-SHVR's numbers of steps, and the baselines of the figures: the
configuration, and options of Fed-SHVR."""


def fed_shvr(settings: dict[str, Any]) -> Iterator[Cell]:
    """Table I. Settings: rounds, hidden, images, variant, split."""
    variant = settings.get("variant", "default")
    sizes = {"hidden": settings.get("hidden", 5000), "images": settings.get("images", 60000)}
    sizes["rounds"] = settings.get("rounds", 1)
    for split in [settings["split"]] if "split" in settings else ("iid", "noniid"):
        partition = {f"data.partition.init_args.{k}": v for k, v in SHVR_SPLITS[split].items()}
        for name, (config, options) in SHVR_CELLS.items():
            changed = {} if options is None else {**SHVR_VARIANTS[variant], **options}
            if changed and variant == "step 0.3, labels 0.6":  # alpha_1 acts through alpha_0 / alpha_1 alone
                changed["alpha1"] /= 2
            key = {"cell": name, "split": split, "reading": "-" if options is None else variant, **sizes}
            common = {
                "data.max_train_images": sizes["images"], "data.validation": "test", **partition,
                "trainer.check_val_every_n_rounds": 5, "model.init_args.network.init_args.hidden": [sizes["hidden"]],
            }  # fmt: skip
            model = {f"model.init_args.{k}": v for k, v in changed.items()}
            yield Cell(key, [f"{config}_{split.split('_')[0]}.yaml", model, common])


def readings(settings: dict[str, Any]) -> Iterator[Cell]:
    """Table I by reading of the text. Settings: rounds, hidden, images."""
    for split in list(SHVR_SPLITS)[1:]:
        for variant in SHVR_VARIANTS:
            if variant in ("printed", "literal") or (variant.startswith("once") and split != "noniid"):
                continue
            for cell in fed_shvr({**settings, "variant": variant, "split": split}):
                if cell.key["cell"].startswith("fedshvr"):
                    yield cell


class SmallNet(Network):
    """Three 3x3 convolutions of 8, 16, 32 channels and stride 2, each with norm and ReLU; then linear.

    Group norm has 4 groups: with 32, as in the paper, every group would be a single channel.
    """

    def __init__(
        self, num_classes: int = 10, in_shape: tuple[int, int, int] = (1, 28, 28), norm: str = "group"
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels, out in ((in_shape[0], 8), (8, 16), (16, 32)):
            layer = nn.GroupNorm(4, out) if norm == "group" else nn.BatchNorm2d(out)
            layers += [nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False), layer, nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(32 * (-(-in_shape[1] // 8)) * (-(-in_shape[2] // 8)), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)``."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits


class SmallResNet(ResNet9):
    """ResNet-9 at a sixteenth of its widths: 4 to 32 channels; group norm has 2 groups of 2 to 16 channels."""

    def __init__(
        self, num_classes: int = 10, in_shape: tuple[int, int, int] = (3, 32, 32), norm: str = "group"
    ) -> None:
        super().__init__(num_classes, in_shape, norm="batch", width=4)
        for block in self.modules() if norm == "group" else ():
            for name, layer in block.named_children():
                if isinstance(layer, nn.BatchNorm2d):
                    setattr(block, name, nn.GroupNorm(2, layer.num_features))


_HALF = {"server_only_rounds": 100}
_ONE_PLACE = {**_HALF, "groups": 1, "server_votes": 1_000_000, "consistency_weight": 0}
_COUNTS_3 = {"groups": 1, "server_votes": 3}
_GROUPING = {"dataset": "mnist", "clients": 30, "rounds": 160, "local_steps": 2, "lr": 0.06}
_NORMS: dict[str, dict[str, Any]] = {"batch norm": {"norm": "batch", "groups": 1}, "group norm": {"groups": 1}}
RGD_CLAIMS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, dict[str, Any]]]] = {
    "norm": ({"dataset": "mnist", "clients": 10, "rounds": 360, "local_steps": 2, "lr": 0.02}, {}, _NORMS),
    "norm, ResNet": (
        {"dataset": "cifar10", "clients": 10, "rounds": 60, "local_steps": 8, "lr": 0.01},
        {"num_labels": 5000, "label_location": "clients", "server_batch_size": 16},
        _NORMS,
    ),
    "grouping": (_GROUPING, {}, {"FedAvg": {"groups": 1}, "grouping, S = 3": {"groups": 3, "regroup": "slots"}}),
    "votes": (_GROUPING, {}, {"FedAvg, server counts 3": _COUNTS_3}),
    "regroup": (_GROUPING, {}, {"regrouping each round, S = 3": {"groups": 3}}),
    "labels": (_GROUPING, {}, {"labels alone, server counts 3": {**_COUNTS_3, "consistency_weight": 0}}),
    **{
        f"half, {labels:,} labels": (
            {**_GROUPING, "rounds": 320},
            {"num_labels": labels},
            {
                "regrouping each round, S = 3": {**_HALF, "groups": 3, "server_votes": 10},
                "FedAvg": {**_HALF, "groups": 1, "server_votes": 30},
                "labels alone": {**_HALF, "groups": 1, "server_votes": 30, "consistency_weight": 0},
                "labels in one place": _ONE_PLACE,
                "labels in one place, 10 steps a round": {**_ONE_PLACE, "local_steps": 10},
            },
        )
        for labels in (100, 200, 1000)
    },
}
"""Settings, keys of data, and options of the variants. All have skew R = 0.4, threshold 0.95, a 7/16 cosine, and 1,000
labels at the server; on CIFAR-10 they are at the users, because with 1,000 at the server no image gets a confident
label in so few rounds."""


def fedrgd(settings: dict[str, Any]) -> Iterator[Cell]:
    """FedRGD's claims. Settings: dataset, rounds, local_steps, lr."""
    for claim, (usual, keys, variants) in RGD_CLAIMS.items():
        chosen = usual | {name: value for name, value in settings.items() if name in usual}
        for variant, options in variants.items():
            network = "SmallNet" if chosen["dataset"] == "mnist" else "SmallResNet"
            own = {name: value for name, value in options.items() if name != "norm"}
            sgd = {"lr": chosen["lr"], "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
            model = {
                "network": {"class_path": f"papers.{network}", "init_args": {"norm": options.get("norm", "group")}},
                "optimizer": {"class_path": "torch.optim.SGD", "init_args": sgd},
                "schedule": "FractionalCosine",
                "local_steps": chosen["local_steps"],
                "bn_buffers": "average" if "label_location" in keys else "slot",  # no server, no buffers of its own
                **own,
            }
            data = {
                "dataset": chosen["dataset"], "num_clients": chosen["clients"], "num_labels": 1000,
                "partition": {"class_path": "ClassSkew", "init_args": {"r": 0.4}}, "server_batch_size": 64,
                "client_batch_size": 16, "validation": "test", **keys,
            }  # fmt: skip
            measure = "examples.diagnostics.gradient_diversity.GradientDiversity"
            diversity = {"class_path": measure, "init_args": {"every_n_rounds": 2}}
            trainer = {
                "clients_per_round": chosen["clients"], "check_val_every_n_rounds": max(1, chosen["rounds"] // 8),
                "callbacks": [diversity],
            }  # fmt: skip
            configuration = {"trainer": trainer, "model": {"class_path": "FedRGD", "init_args": model}, "data": data}
            yield Cell({"claim": claim, **chosen, "variant": variant}, [configuration])


_CLIENTS, _ACTIVE, _STEPS, _BATCH = 20, 5, 10, 32
SFL_SETTINGS: dict[str, dict[str, Any]] = {
    "mnist": {
        "network": {"class_path": "SVHNCNN", "init_args": {"width": 8, "hidden": 128}},
        "split": 2, "labels": 100, "rounds": 40, "lr": 0.03, "server_steps": 10,
    },
    "cifar10": {
        "network": {"class_path": "AlexNet", "init_args": {"width": 8}},
        "split": 5, "labels": 4000, "rounds": 20, "lr": 0.05, "server_steps": 100,
    },
}  # fmt: skip
_MORE = 3.6
"""This multiple of K_s is about the mean of the adapted K_s on MNIST: a control with as many steps of the server."""
SYSTEM = {
    "class_path": "SystemModel",
    "init_args": {
        "devices": [{"name": "fast", "seconds": 0.05, "std": 0.01}, {"name": "slow", "seconds": 0.15, "std": 0.03}],
        "server_step_s": 0.01,
    },
}
"""Examples of devices, and the paper's links, which are the defaults."""


def semi_sfl(settings: dict[str, Any]) -> Iterator[Cell]:
    """Semi-SFL, its ablations and baselines. Settings: dataset, partition, rounds."""
    dataset = settings.get("dataset", "mnist")
    usual = SFL_SETTINGS[dataset]
    steps, more = usual["server_steps"], round(_MORE * usual["server_steps"])
    length = settings.get("rounds", usual["rounds"])
    joint = {"split": usual["split"], "threshold": 0.95, "server_steps": steps, "client_steps": _STEPS}
    contrast, alone = joint | {"queue_size": _ACTIVE * _BATCH}, joint | {"client_steps": 0}
    epochs = steps * _BATCH / usual["labels"]
    semifl = {"client_epochs": 1, "server_epochs": epochs, "server_phase": "before"}
    methods: dict[str, tuple[str, dict[str, Any]]] = {
        "supervised-only": ("FedSwitchSL", alone),
        "SemiFL": ("SemiFL", semifl),
        "FedSwitch-SL": ("FedSwitchSL", joint),
        "Semi-SFL": ("SemiSFL", contrast),
        "Semi-SFL, no clustering": ("SemiSFL", contrast | {"clustering": 0.0}),
        "Semi-SFL, no T": ("SemiSFL", contrast | {"supervised_contrastive": 0.0}),
        "Semi-SFL, neither": ("SemiSFL", contrast | {"clustering": 0.0, "supervised_contrastive": 0.0}),
        "Semi-SFL, four steps in the queue": ("SemiSFL", contrast | {"queue_size": 4 * _ACTIVE * _BATCH}),
        "FedSwitch-SL, teacher only": ("FedSwitchSL", joint | {"beta": 0.0}),
        "Semi-SFL, adaptive K_s": ("SemiSFL", contrast | {"server_steps": None}),
        "Semi-SFL, K_s from 80": ("SemiSFL", contrast | {"server_steps": None}),
        "Semi-SFL, larger K_s": ("SemiSFL", contrast | {"server_steps": more}),
        "supervised-only, larger K_s": ("FedSwitchSL", alone | {"server_steps": more}),
        "SemiFL, larger K_s": ("SemiFL", semifl | {"server_epochs": _MORE * epochs}),
        "FedSwitch-SL, larger K_s": ("FedSwitchSL", joint | {"server_steps": more}),
        **{f"Semi-SFL, K_s = {value}": ("SemiSFL", contrast | {"server_steps": value}) for value in (80, 50, 32, 5)},
    }
    sgd = {"lr": usual["lr"], "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
    kinds = {"iid": "Iid", "dir0.1": {"class_path": "ClientDirichlet", "init_args": {"alpha": 0.1}}}
    for partition in [settings["partition"]] if "partition" in settings else kinds:
        for name, (method, options) in methods.items():
            model = {
                "network": usual["network"], "optimizer": {"class_path": "torch.optim.SGD", "init_args": sgd},
                "schedule": {"class_path": "Cosine", "init_args": {"final": 0.25}}, **options,
            }  # fmt: skip
            milestones = [max(1, length * share // 100) for share in (15, 25, 40, 60, 70)]
            start = 80 if name.endswith("80") else steps * 80 // 50
            window = 10 if milestones[0] >= 20 else 3
            adapted = {"start": start, "milestones": milestones, "window": window}
            callbacks = [{"class_path": "GlobalUpdateFrequency", "init_args": adapted}]
            data = {
                "dataset": dataset, "num_clients": _CLIENTS, "num_labels": usual["labels"],
                "partition": kinds[partition], "server_batch_size": _BATCH, "client_batch_size": _BATCH,
                "validation": "test", "max_train_images": usual["labels"] + _CLIENTS * _STEPS * _BATCH,
                "max_test_images": 1000,
            }  # fmt: skip
            trainer = {"clients_per_round": _ACTIVE, "check_val_every_n_rounds": 2, "system": SYSTEM}
            if options.get("server_steps", 0) is None:
                trainer["callbacks"] = callbacks
            configuration = {"trainer": trainer, "model": {"class_path": method, "init_args": model}, "data": data}
            key = {"dataset": dataset, "partition": partition, "method": name, "round": length}
            yield Cell(key, [configuration])


NEXT: dict[str, dict[str, float | str]] = {
    "fedrgd_tables.yaml": {
        "FedRGD (labels at clients)": 71.61, "FedRGD (labels at clients, not IID)": 69.05,
        "FedRGD (ResNet-9, R = 0)": 63.32, "FedRGD (ResNet-9, R = 1)": 63.24, "FedMatch (labels at clients)": "",
        "FedMatch (labels at clients, not IID)": "", "FedMatch (R = 0)": "", "FedMatch (R = 1)": "",
    },
    "fssl_table.yaml": {"SAGE": 87.05, "ProxyFL": 88.56, "FixMatch-GPL (received model's labels)": 84.56},
    "cifar10_4000.yaml": {
        "SemiFL": 93.1, "4000 labels alone": 76.9, "FedAvg + FixMatch (Table 2)": "",
        "Semi-SFL (Dir 0.1)": 83.4, "FedSwitch-SL (Dir 0.1)": 79.2,
    },
}  # fmt: skip
"""Suites, and the labels of the runs that come next, with the published accuracy after the last round."""


def following(settings: dict[str, Any]) -> Iterator[Cell]:
    """The tables that need a GPU, those first that tell most for their hours. No settings."""
    for name, published in NEXT.items():
        suite = yaml.safe_load((SUITES / name).read_text(encoding="utf-8"))
        entries = {entry["label"]: (group, entry) for group in suite["groups"] for entry in group["entries"]}
        for label, accuracy in published.items():
            group, entry = entries[label]
            files = [entry["config"]] if isinstance(entry["config"], str) else entry["config"]
            overrides = [part.get("overrides", {}) for part in (suite, group, entry)]
            yield Cell({"suite": name, "label": label, "published": accuracy}, [*files, *overrides])


class Curve(FederatedCallback):
    """Appends a row for every round with an accuracy, and stops the run, to be resumed, when its time has come.

    Args:
        key: The first columns.
        end: The time, as of ``time.monotonic``.
    """

    def __init__(self, key: dict[str, str], end: float) -> None:
        self.key = key
        self.end = end

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        """See the class."""
        key = self.key | {"round": str(trainer.round_index), "of": str(trainer.max_rounds)}
        if "val/accuracy" in metrics and not is_known(RESULTS / "curves.csv", key):
            append(RESULTS / "curves.csv", key | {"accuracy": f"{100 * metrics['val/accuracy']:.2f}"})
        trainer.should_stop |= time.monotonic() >= self.end


def run(cell: Cell, seed: int, root: str, folder: Path, accelerator: str, curve: Curve) -> list[Row]:
    """Train and test; the scalars of all rounds, none if its time came first. A run that was stopped resumes."""
    common = {
        "seed_everything": seed, "data.root": root, "trainer.accelerator": accelerator,
        "trainer.enable_progress_bar": False, "trainer.default_root_dir": str(folder),
    }  # fmt: skip
    if length := cell.key.get("rounds") or cell.key.get("round"):
        common["trainer.max_rounds"] = length
    trainer, model, data = Experiment.from_config(*cell.configurations, common)
    trainer.given_callbacks = [*trainer.given_callbacks, curve]
    trainer.fit(model, data, ckpt_path="last" if rounds(folder) else None)
    return rounds(folder) if trainer.round_index == trainer.max_rounds else []


COLUMNS = {
    "mask_rate": "client/mask_rate", "update": "diversity/update_l2_squared",
    "update_with_server": "diversity/update_l2_squared_with_server",
}  # fmt: skip
"""Further columns of the rows, and the scalars of which they hold the mean over the second half of the run."""

TABLES = {
    "fed_shvr": (fed_shvr, "cell", "fed_shvr_table1.csv", 100),
    "readings": (readings, "cell", "fed_shvr_table1.csv", 100),
    "fedrgd": (fedrgd, "claim", "fedrgd_claims.csv", 1),
    "semi_sfl": (semi_sfl, "method", "semi_sfl.csv", 1),
    "next": (following, "label", "next_tables.csv", 100),
}
"""The cells of every table, the column that ``--only`` selects by, the file, and the unit of its accuracies."""


def main() -> None:
    """Run what the CSV file of a table does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--root", default="data", help="the data folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, help="another length than the table's")
    parser.add_argument("--only", nargs="+", help="names of cells, claims or methods; default: all")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the table")
    parser.add_argument("--accelerator", default="cpu", help="cpu, or cuda")
    parser.add_argument("--csv", help="another file in benchmarks/results")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then; the same command resumes")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    settings: dict[str, Any] = {name: _value(text) for name, _, text in (one.partition("=") for one in options.set)}
    settings |= {} if options.rounds is None else {"rounds": options.rounds}
    cells, name, usual, unit = TABLES[options.table]
    path = RESULTS / (options.csv or usual)
    for seed in options.seeds:
        for cell in cells(settings):
            key = {name: str(value) for name, value in {**cell.key, "seed": seed}.items()}
            if (options.only and cell.key[name] not in options.only) or is_known(path, key):
                continue
            began, clock = time.process_time(), time.perf_counter()
            folder = Path("runs", "papers", options.table, slug(" ".join(key.values())))
            curve = Curve({"table": options.table, "run": str(cell.key[name]), "seed": str(seed)}, end)
            rows = run(cell, seed, options.root, folder, options.accelerator, curve)
            if not rows:
                return
            last = rows[-1]
            found = {"accuracy": unit * last["test/accuracy"], "loss": last["test/loss"]}
            late = {column: [row[n] for row in rows[len(rows) // 2 :] if n in row] for column, n in COLUMNS.items()}
            found |= {column: fmean(values) for column, values in late.items() if values}
            found |= {"cpu_s": time.process_time() - began, "wall_s": time.perf_counter() - clock}
            device = torch.cuda.get_device_name() if options.accelerator == "cuda" else "CPU"
            append(path, key | {column: f"{value:.5g}" for column, value in found.items()} | {"device": device})
            for spent in folder.rglob("checkpoints"):
                shutil.rmtree(spent)  # what is left resumes the other runs
            if time.monotonic() >= end:
                return


def _value(text: str) -> Any:
    return int(text) if text.isdecimal() else float(text) if text.replace(".", "", 1).isdecimal() else text


def is_known(path: Path, key: dict[str, str]) -> bool:
    """Whether a file has a row with these values."""
    if not path.is_file():
        return False
    with path.open(newline="", encoding="utf-8") as file:
        return any(all(row.get(name, value) == value for name, value in key.items()) for row in csv.DictReader(file))


def append(path: Path, row: dict[str, str]) -> None:
    """Append a row; a file that exists keeps its columns."""
    print(*row.values(), flush=True)
    new = not path.is_file()
    columns = list(row) if new else path.read_text(encoding="utf-8").splitlines()[0].split(",")
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
