from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml

from lightning_fedssl.cli import FederatedCLI
from lightning_fedssl.data import datasets
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.trainer import FederatedTrainer

FOLDER = Path(__file__).resolve().parents[2] / "configs"
CONFIGS = {
    str(path.relative_to(FOLDER).with_suffix("")): path
    for path in sorted(FOLDER.rglob("*.yaml"))
    if path.parent.name != "suites"  # tests/test_suites.py
}
OVERLAY_BASES = {
    "fedrgd": "fedrgd_cifar10",
    "fedshvr": "fedshvr_mnist_iid",
    "semifl": "semifl_cifar10_4000",
    "semisfl": "semisfl_cifar10_4000",
    "system": "semifl_digits",
    "images": "semifl_digits",
    "mixmatch": "fixmatch_pooled_digits",
    "pi_model": "fixmatch_pooled_digits",
    "pooled": "fixmatch_digits",
    "pretrained_images": "semifl_digits",
    "signals": "semifl_signals",
    "table2": "semifl_cifar10_4000",
    "table3": "semifl_cifar10_4000",
    "table5": "semifl_cifar10_4000",
    "table": "semifl_breast_cancer",
}
"""What an overlay lies on, by the beginning of its name."""

# Stand-in sets are small, and so are the networks on them. An untrained network is never confident: with a threshold of
# 0 SemiFL's clients train all the same.
BRIEF = ["--trainer.fast_dev_run=true", "--trainer.accelerator=cpu", "--trainer.max_rounds=1"]
SMALL_DATA = ["--data.num_clients=5", "--trainer.clients_per_round=2"]


def files(name: str) -> list[str]:
    """The arguments that choose a configuration; an overlay comes on top of its base."""
    chosen = [CONFIGS[name]] if CONFIGS[name].parent == FOLDER else [CONFIGS[base_of(name)], CONFIGS[name]]
    offline = ["--data.backbone.weights=null", "--data.backbone.size=32"] if name.endswith("pretrained_images") else []
    return [*(f"--config={path}" for path in chosen), *offline]


def base_of(name: str) -> str:
    """The configuration that an overlay lies on."""
    return next(base for start, base in OVERLAY_BASES.items() if CONFIGS[name].stem.startswith(start))


def load_stand_in(name: str, root: str = "data", download: bool = False) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
    """Random images of the data set's shape."""
    spec = datasets.SPECS[name]
    generator = torch.Generator().manual_seed(0)

    def split(per_class: int) -> ImageSplit:
        labels = torch.arange(spec.num_classes).repeat(per_class)
        images = torch.randint(256, (len(labels), *spec.in_shape), dtype=torch.uint8, generator=generator)
        return ImageSplit(images, labels)

    return spec, split(3 if spec.num_classes == 100 else 6), split(1)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)


def parsed(name: str, *options: str) -> FederatedCLI:
    return FederatedCLI(args=[*files(name), *options], run=False)


@functools.cache
def resolved(name: str, *options: str) -> dict[str, Any]:
    """Every value of a configuration by its dotted key, defaults included; class paths by their bare name."""
    return dict(flat("", parsed(name, *options).config.as_dict()))


def flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from flat(f"{prefix}.{key}" if prefix and key != "init_args" else prefix or key, part)
    elif isinstance(value, list) and all(isinstance(part, dict) and "class_path" in part for part in value):
        for part in value:
            yield from flat(f"{prefix}.{part['class_path'].rpartition('.')[2]}", part.get("init_args", {}))
    else:
        yield prefix, value.rpartition(".")[2] if prefix.endswith("class_path") else value


def small_options(values: dict[str, Any]) -> list[str]:
    """What makes a configuration quick, on stand-in data or on fewer digits."""
    if values.get("data.dataset", "digits") == "digits":
        return ["--data.max_train_images=500", "--data.max_test_images=50"]
    options = [] if values["data.num_clients"] == 1 else list(SMALL_DATA)
    if values["data.num_labels"] != "all":
        options.append(f"--data.num_labels={ {'cifar100': 100, 'emnist': 94}.get(values['data.dataset'], 20) }")
    if values["model.network.class_path"] == "WideResNet":
        options += ["--model.network.depth=10", "--model.network.widen_factor=1"]
    if values["model.network.class_path"] in ("AlexNet", "CNN13", "ResNet8", "ResNet9", "ResNet18", "SVHNCNN", "VGG11"):
        options.append("--model.network.width=4")
    if values["model.class_path"] == "FedRGD":
        options.append("--model.groups=2")
    if values.get("model.warmup_rounds") and values["model.class_path"] != "CBAFed":
        options.append("--model.warmup_rounds=0")
    smaller = {"num_clients": 5, "num_unlabeled": 10, "deal_as": 20, "server_images": 10}
    options += [f"--data.partition.{k}={v}" for k, v in smaller.items() if values.get(f"data.partition.{k}")]
    return options


def warms_up(values: dict[str, Any]) -> bool:
    """Whether labelled clients alone train in the first round, so that no drawn client may train."""
    return values["model.class_path"] in ("CBAFed", "RSCFed")


def test_all_files_of_the_folder_are_cases() -> None:
    in_folder = [name for _, _, names in os.walk(FOLDER) for name in names if name.endswith((".yaml", ".yml"))]
    assert len(CONFIGS) + len(list((FOLDER / "suites").iterdir())) == len(in_folder) > 30


def like_earlier_ones() -> set[str]:
    """The configurations whose keys, classes and words are all in earlier ones, those of the digits being first."""
    seen: set[tuple[str, object]] = set()
    found = set()
    for name in sorted(CONFIGS, key=lambda name: ("/" in name, "digits" not in name)):
        values = flat("", yaml.safe_load(CONFIGS[name].read_text(encoding="utf-8")))
        has = {(key, v if isinstance(v, (str, bool)) else None) for key, v in values if not key.endswith("root_dir")}
        found |= {name} if has <= seen else set()
        seen |= has
    return found


LIKE_EARLIER_ONES = like_earlier_ones()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LIKE_EARLIER_ONES else n for n in CONFIGS]
)
def test_config_runs_one_round(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    values = resolved(name)
    if values.get("data.dataset", "digits") != "digits":
        monkeypatch.setattr(datasets, "load", load_stand_in)
    options = [*BRIEF, *small_options(values)]
    if values["model.class_path"] in ("SemiFL", "FL2"):
        options.append("--model.threshold=0")
    if values.get("model.server_only_rounds"):
        options.append("--model.server_only_rounds=0")
    cli = parsed(name, *options)
    cli.trainer.fit(cli.model, cli.datamodule)
    said = [*caplog.messages, *(str(warning.message) for warning in recwarn)]
    assert not [line for line in said if "no effect" in line]
    trainer = cast(FederatedTrainer, cli.trainer)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    assert trainer.round_index == 1
    assert 0 <= metrics["test/accuracy"] <= 1
    drawn = min(2, values["trainer.clients_per_round"] or 2)
    trained = metrics.get("client/trained", 0)
    assert trained == (0 if values["model.class_path"] == "Supervised" else drawn) or warms_up(values)
    beside_users = values["model.class_path"] == "FedRGD" and values["data.partition.server_images"] > 0
    assert ("server/loss" in metrics) == (values["data.label_location"] == "server" or beside_users)
    assert all(torch.isfinite(weight).all() for weight in cli.model.server.parameters.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_config_says_what_it_is_and_writes_below_its_own_name(name: str) -> None:
    comment = CONFIGS[name].read_text(encoding="utf-8").split("\n")[:2]
    assert all(line.startswith("# ") for line in comment)
    values = resolved(name)
    folder = OVERLAY_BASES["system"] if CONFIGS[name].stem == "system" else CONFIGS[name].stem
    assert str(values["trainer.default_root_dir"]) == f"runs/{folder}"
    assert values["data.root"] == "data"


WIDE_RESNET = {"model.network.class_path": "WideResNet", "model.network.norm": "static_batch", "data.num_clients": 100}
SEMIFL = WIDE_RESNET | {
    "trainer.max_rounds": 800, "trainer.clients_per_round": 10, "trainer.callbacks.StaticBatchNorm.source": "pooled",
    "model.class_path": "SemiFL", "model.threshold": 0.95, "model.mixup_alpha": 0.75, "model.mix_weight": 1.0,
    "model.client_epochs": 5, "model.server_epochs": 5, "model.optimizer.lr": 0.03,
    "model.aggregation_optimizer.momentum": 0.5, "model.optimizer.momentum": 0.9, "model.optimizer.weight_decay": 5e-4,
    "model.schedule.class_path": "Cosine", "data.client_batch_size": 10, "data.strong": "semifl",
}  # fmt: skip
SUPERVISED = WIDE_RESNET | {"trainer.max_rounds": 400, "model.class_path": "Supervised", "model.optimizer.lr": 0.1}
FED_SHVR = {
    "model.class_path": "FedSHVR", "model.optimizer.lr": 0.01, "model.optimizer.momentum": 0, "model.alpha1": 0.75,
    "model.alpha2": 0.1, "model.client_epochs": 2, "model.averaging": "normalized", "data.client_batch_size": 32,
    "data.label_location": "clients",
}  # fmt: skip
FED_SHVR_MNIST = {
    "trainer.max_rounds": 100, "data.num_clients": 10, "data.num_labels": 600, "model.network.hidden": (5000,)
}  # fmt: skip
FEDRGD = {
    "model.class_path": "FedRGD", "model.optimizer.momentum": 0.9, "model.optimizer.weight_decay": 1e-4,
    "model.schedule.class_path": "FractionalCosine", "model.schedule.fraction": 7 / 16, "model.local_steps": 16,
    "model.threshold": 0.95, "data.partition.class_path": "ClassSkew", "data.partition.r": 0.4,
    "data.client_batch_size": 64, "data.weak": "flip_crop", "data.strong": "fixmatch",
}  # fmt: skip
SEMI_SFL = {
    "model.optimizer.lr": 0.02, "model.optimizer.momentum": 0.9, "model.schedule.final": 0.25, "model.client_steps": 50,
    "model.threshold": 0.95, "model.teacher_decay": 0.99, "trainer.max_rounds": 1000,
    "trainer.clients_per_round": 10, "data.num_clients": 30, "data.client_batch_size": 64, "data.weak": "flip_crop",
}  # fmt: skip


def table_1(labels: int, server_batch: int, widen_factor: int) -> dict[str, Any]:
    """SemiFL's Table 1 by the number of labels."""
    network = {"model.network.depth": 28, "model.network.widen_factor": widen_factor}
    return {"data.num_labels": labels, "data.server_batch_size": server_batch, **network}


def users(users: int, drawn: int, labels: int, groups: Any, rounds: int, lr: float) -> dict[str, Any]:
    """FedRGD's Tables I and II by the numbers of users, drawn users, labels, groups and rounds."""
    keys = ("data.num_clients", "trainer.clients_per_round", "data.num_labels", "model.groups", "trainer.max_rounds")
    return {**dict(zip(keys, (users, drawn, labels, groups, rounds), strict=True)), "model.optimizer.lr": lr}


FULLY_LABELED = {
    "model.optimizer.lr": 0.03, "model.optimizer.momentum": 0.9, "model.optimizer.weight_decay": 5e-4,
    "model.gradient_clip_norm": 5.0, "data.num_clients": 10, "data.num_labels": "all", "data.label_location": "clients",
    "data.client_batch_size": 64, "data.partition.class_path": "FullyLabeledClients",
    "data.partition.labeled_clients": 1, "data.weak": "flip_crop",
}  # fmt: skip

FL2 = {
    "model.class_path": "FL2", "model.rho": 0.1, "model.eta": 0.01, "model.pretrain_epochs": 50, "model.schedule": None,
    "model.schedule.class_path": "missing", "data.num_labels": 40, "data.server_batch_size": 10,
    "data.client_batch_size": 32, "data.strong": "fixmatch",
}  # fmt: skip
FED_DB = {
    "trainer.max_rounds": 800, "trainer.clients_per_round": 10, "model.class_path": "FedDB", "model.threshold": 0.95,
    "model.client_epochs": 5, "model.aggregation_optimizer.momentum": 0.5, "model.optimizer.lr": 0.03,
    "model.optimizer.nesterov": True, "model.gradient_clip_norm": 1.0, "model.schedule.class_path": "Cosine",
    "data.num_labels": 4000, "data.label_location": "clients", "data.strong": "semifl",
}  # fmt: skip
RSC_FED = {
    "trainer.max_rounds": 3 * 1000, "trainer.clients_per_round": 5, "model.class_path": "RSCFed",
    "model.sub_consensus": 3, "model.distance_scale": 1e4, "model.labeled_distance_scale": 100.0,
    "model.labeled_factor": 6.0, "model.unlabeled_weight": 0.02 * 0.021 / 0.03, "model.temperature": 0.5,
    "model.teacher_decay": 0.999,
}  # fmt: skip
CBA_FED = {
    "trainer.max_rounds": 1 + 501, "trainer.clients_per_round": 10, "model.class_path": "CBAFed",
    "model.network.norm": "batch", "model.warmup_epochs": 501, "model.client_epochs": 11, "model.threshold": 0.84,
    "model.threshold_cap": 0.9, "model.rare_share": 0.03, "model.unlabeled_weight": 2 / 3,
}  # fmt: skip
SAGE = {
    "trainer.max_rounds": 300, "trainer.clients_per_round": 8, "model.network.class_path": "ResNet8",
    "model.network.width": 64, "model.optimizer.lr": 0.1, "model.optimizer.momentum": 0.9,
    "model.optimizer.weight_decay": 1e-4, "model.threshold": 0.95, "model.half_gap": 0.05, "model.unlabeled_ratio": 2,
    "model.unlabeled_weight": 1.0, "model.client_epochs": 5, "data.num_clients": 20, "data.num_labels": 5000,
    "data.label_location": "clients", "data.client_batch_size": 128,
}  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = {
    "semifl_cifar10_250": SEMIFL | table_1(250, 10, 2),
    "semifl_cifar10_4000": SEMIFL | table_1(4000, 250, 2),
    "semifl_svhn_250": SEMIFL | table_1(250, 10, 2),
    "semifl_svhn_1000": SEMIFL | table_1(1000, 10, 2),
    "semifl_cifar100_2500": SEMIFL | table_1(2500, 250, 8),
    "semifl_cifar100_10000": SEMIFL | table_1(10000, 250, 8),
    "fl2_cifar10_40": {key: value for key, value in SEMIFL.items() if "mix" not in key} | FL2,
    "feddb_cifar10_4000": WIDE_RESNET | FED_DB,
    "rscfed_svhn": FULLY_LABELED | RSC_FED,
    "cbafed_svhn": FULLY_LABELED | CBA_FED,
    "sage_cifar10": SAGE,
    "supervised_cifar10_all": SUPERVISED,
    "supervised_svhn_all": SUPERVISED,
    "supervised_cifar100_all": SUPERVISED,
    "fedavg_cifar10": WIDE_RESNET | {"trainer.max_rounds": 800, "model.optimizer.lr": 0.03, "model.client_epochs": 5},
    "fedshvr_mnist_iid": FED_SHVR | FED_SHVR_MNIST | {"data.partition.class_path": "Stratified"},
    "fedshvr_mnist_noniid": FED_SHVR | FED_SHVR_MNIST | {"data.partition.class_path": "LabeledClasses"},
    "fedshvr_mnist_noniid_dir01": FED_SHVR | FED_SHVR_MNIST | {"model.ramp_epochs": 50, "data.partition.alpha": 0.1},
    "fedshvr_cifar10_mismatch": FED_SHVR
    | {"trainer.max_rounds": 1000, "data.num_clients": 40, "data.num_labels": 4000, "data.partition.alpha": 0.025},
    "fedrgd_cifar10": FEDRGD | users(10, 10, 1000, 2, 19200, 0.165),
    "fedrgd_svhn": FEDRGD | users(10, 10, 1000, 2, 2560, 0.165) | {"model.schedule.warmup_rounds": 320},
    "fedrgd_emnist_10": FEDRGD | users(47, 10, 4700, 2, 6400, 0.03),
    "fedrgd_emnist_30": FEDRGD | users(47, 30, 4700, 3, 6400, 0.03),
    "fedrgd_emnist_47": FEDRGD | users(47, 47, 4700, [10, 10, 10, 10, 7], 6400, 0.03),
    "fedrgd_stl10": FEDRGD | users(10, 2, 1000, 2, 19200, 0.165) | {"data.partition.r": 0.0},
    "semisfl_svhn_1000": SEMI_SFL | {"model.network.class_path": "SVHNCNN", "model.split": 2, "model.queue_size": 2048},
    "semisfl_cifar10_4000": SEMI_SFL
    | {"model.network.class_path": "AlexNet", "model.split": 5, "model.queue_size": 640},
    "fedswitchsl_svhn_1000": SEMI_SFL | {"model.server_steps": 50, "model.client_teacher_decay": 0.99},
}
"""The published settings that decide a run: the papers' tables and, where they are silent, the authors' code."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_of_a_paper_has_the_published_settings(name: str) -> None:
    values = resolved(name)
    assert {key: values.get(key, "missing") for key in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize("split", ["mnist_iid", "mnist_noniid", "cifar10_mismatch"])
def test_fed_shvr_s_baselines_have_its_clients_and_network(split: str) -> None:
    method = resolved(f"fedshvr_{split}")
    same = ("data.", "model.network.", "model.optimizer.", "model.client_epochs", "trainer.max_rounds")
    keys = [k for k in method if k.startswith((*same, "trainer.clients", "seed"))]
    kinds, (images, kind) = ["pseudolabel_{}_{}", "meanteacher_{}_{}"], split.split("_")
    labels_alone = ["fedavg_{}_600_{}", "fedavg_{}_60000_{}"] if images == "mnist" else ["fedavg_{}_{}"]
    for name in (form.format(images, kind) for form in [*labels_alone, *kinds]):
        other = resolved(name)
        differing = {key for key in keys if other[key] != method[key]}
        assert differing == ({"data.num_labels", "data.partition.deal_as"} if "60000" in name else set())
        assert other["data.num_labels"] == ("all" if "60000" in name else method["data.num_labels"])


SPLIT_LEARNING = ("model.split", "model.client_steps", "trainer.max", "trainer.clients_per", "model.schedule", "seed")
ABLATION = ("data.", "model.network", "model.optimizer", *SPLIT_LEARNING)
BOUND_DATA = ("dataset", "num_clients", "num_labels", "label_location", "partition.class_path", "validation", "root")
BOUND = ("model.network", *(f"data.{key}" for key in BOUND_DATA))
SPLIT_DATA = ("digits", "mnist", "svhn_1000", "cifar10_4000")
TWINS: list[tuple[str, str, Any]] = [(f"fedswitchsl_{data}", f"semisfl_{data}", ABLATION) for data in SPLIT_DATA]
for name in CONFIGS:
    if name.startswith("supervised") and (of := name.replace("supervised", "semifl")) in CONFIGS:
        TWINS.append((name, of, BOUND))


@pytest.mark.parametrize(("name", "method", "same"), TWINS)
def test_an_ablation_and_a_bound_have_the_data_and_network_of_their_method(name: str, method: str, same: Any) -> None:
    twin, values = resolved(name), resolved(method)
    keys = [key for key in values if key.startswith(same)]
    assert {key: twin.get(key) for key in keys} == {key: values[key] for key in keys}


@pytest.mark.parametrize("name", [name for name, path in CONFIGS.items() if path.parent != FOLDER])
def test_an_overlay_changes_the_keys_that_it_names_and_no_other(name: str) -> None:
    """Another class would drop arguments of the base."""
    base, values = resolved(base_of(name)), resolved(name)
    named = [key for key, _ in flat("", yaml.safe_load(CONFIGS[name].read_text(encoding="utf-8")))]
    changed = {key for key in base.keys() & values.keys() if base[key] != values[key]} - {"config"}
    if values["model.class_path"] == base["model.class_path"]:
        assert {key for key in changed if not key.startswith(tuple(named))} <= {"trainer.default_root_dir"}
        dropped = {key for key in base.keys() - values.keys() if not key.startswith(tuple(named))}
        assert dropped <= {"trainer.system"}
