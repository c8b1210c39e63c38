from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

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
    "table": "semifl_cifar10_4000",
}
"""What an overlay lies on, by the beginning of its name."""

# Stand-in sets are small, and so are the networks on them. An untrained network is never confident: with a threshold of
# 0 SemiFL's clients train all the same.
BRIEF = ["--trainer.fast_dev_run=true", "--trainer.accelerator=cpu", "--trainer.max_rounds=1"]
SMALL_DATA = ["--data.num_clients=5", "--trainer.clients_per_round=2"]


def files(name: str) -> list[str]:
    """The arguments that choose a configuration; an overlay comes on top of its base."""
    chosen = [CONFIGS[name]] if CONFIGS[name].parent == FOLDER else [CONFIGS[base_of(name)], CONFIGS[name]]
    return [f"--config={path}" for path in chosen]


def base_of(name: str) -> str:
    """The configuration that an overlay lies on."""
    return next(base for start, base in OVERLAY_BASES.items() if CONFIGS[name].stem.startswith(start))


def load_stand_in(
    name: str, root: str = "data", download: bool = False, image_size: int | None = None, cache_dir: Any = None
) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
    """Random images of the data set's shape."""
    spec = datasets.describe(name, root, image_size)
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
    if values["model.network.class_path"] in ("AlexNet", "CNN13", "ResNet9", "ResNet18", "SVHNCNN", "VGG11"):
        options.append("--model.network.width=4")
    if values["model.class_path"] == "FedRGD":
        options.append("--model.groups=2")
    if values.get("model.warmup_rounds"):
        options.append("--model.warmup_rounds=0")
    smaller = {"num_clients": 5, "num_unlabeled": 10, "deal_as": 20, "server_images": 10}
    options += [f"--data.partition.{k}={v}" for k, v in smaller.items() if values.get(f"data.partition.{k}")]
    return options


def test_all_files_of_the_folder_are_cases() -> None:
    in_folder = [name for _, _, names in os.walk(FOLDER) for name in names if name.endswith((".yaml", ".yml"))]
    assert len(CONFIGS) + len(list((FOLDER / "suites").iterdir())) == len(in_folder) > 30


@pytest.mark.parametrize("name", CONFIGS)
def test_config_runs_one_round(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    values = resolved(name)
    if values.get("data.dataset", "digits") != "digits":
        monkeypatch.setattr(datasets, "load", load_stand_in)
    options = [*BRIEF, *small_options(values)]
    if values["model.class_path"] == "SemiFL":
        options.append("--model.threshold=0")
    if values.get("model.server_only_rounds"):
        options.append("--model.server_only_rounds=0")
    cli = FederatedCLI(args=["fit", *files(name), *options])
    said = [*caplog.messages, *(str(warning.message) for warning in recwarn)]
    assert not [line for line in said if "no effect" in line]
    trainer = cast(FederatedTrainer, cli.trainer)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    assert trainer.round_index == 1
    assert 0 <= metrics["test/accuracy"] <= 1
    drawn = min(2, values["trainer.clients_per_round"])
    assert metrics.get("client/trained", 0) == (0 if values["model.class_path"] == "Supervised" else drawn)
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


@pytest.mark.parametrize(
    ("options", "partition"),
    [
        (["--data.partition", "Shards"], {"class_path": "Shards", "classes_per_client": 2}),
        (["--data.partition", "Dirichlet", "--data.partition.alpha", "0.1"], {"class_path": "Dirichlet", "alpha": 0.1}),
    ],
)
def test_partition_is_one_option_away_as_the_comments_say(options: list[str], partition: dict[str, Any]) -> None:
    values = resolved("semifl_cifar10_4000", *options)
    assert {key: values[f"data.partition.{key}"] for key in partition} == partition


SGD = {
    "model.optimizer.class_path": "SGD",
    "model.optimizer.momentum": 0.9,
    "model.optimizer.nesterov": True,
    "model.optimizer.weight_decay": 5e-4,
    "model.optimizer.dampening": 0.0,
    "model.server_optimizer": None,
    "model.schedule.class_path": "Cosine",
    "model.schedule.rounds": None,
    "model.schedule.final": 0.0,
    "model.gradient_clip_norm": 1.0,
    "model.keep_server_optimizer": True,
}
WIDE_RESNET = {
    "model.network.class_path": "WideResNet",
    "model.network.depth": 28,
    "model.network.norm": "static_batch",
    "data.weak": "auto",
    "data.validation": "test",
    "data.partition.class_path": "Iid",
    "data.num_clients": 100,
    "data.max_train_images": None,
    "data.max_test_images": None,
}
TABLE_4 = {
    **SGD,
    **WIDE_RESNET,
    "trainer.max_rounds": 800,
    "trainer.clients_per_round": 10,
    "trainer.callbacks.StaticBatchNorm.source": "pooled",
    "trainer.callbacks.StaticBatchNorm.average": "auto",
    "model.optimizer.lr": 0.03,
    "model.client_epochs": 5,
    "model.server_momentum": 0.5,
    "model.server_lr": 1.0,
    "model.client_weighting": "uniform",
    "model.keep_client_optimizer": True,
    "data.client_batch_size": 10,
}
SEMIFL = {
    **TABLE_4,
    "model.class_path": "SemiFL",
    "model.threshold": 0.95,
    "model.mixup_alpha": 0.75,
    "model.mix_weight": 1.0,
    "model.pseudo_label_source": "global",
    "model.soft_labels": False,
    "model.mix_order": "views",
    "model.mix_resample": "access",
    "model.server_epochs": 5,
    "model.server_phase": "after",
    "data.label_location": "server",
    "data.strong": "semifl",
}
SUPERVISED = {
    **SGD,
    **WIDE_RESNET,
    "model.class_path": "Supervised",
    "trainer.max_rounds": 400,
    "model.optimizer.lr": 0.1,
    "model.server_epochs": 1,
    "data.label_location": "server",
}


def data_of(dataset: str, labels: int | str, server_batch: int) -> dict[str, Any]:
    return {
        "data.dataset": dataset,
        "data.num_labels": labels,
        "data.server_batch_size": server_batch,
        "model.network.widen_factor": 8 if dataset == "cifar100" else 2,
    }


PAPER = {
    "semifl_cifar10_250": SEMIFL | data_of("cifar10", 250, 10),
    "semifl_cifar10_4000": SEMIFL | data_of("cifar10", 4000, 250),
    "semifl_svhn_250": SEMIFL | data_of("svhn", 250, 10),
    "semifl_svhn_1000": SEMIFL | data_of("svhn", 1000, 10),
    "semifl_cifar100_2500": SEMIFL | data_of("cifar100", 2500, 250),
    "semifl_cifar100_10000": SEMIFL | data_of("cifar100", 10000, 250),
    "supervised_cifar10_250": SUPERVISED | data_of("cifar10", 250, 10),
    "supervised_cifar10_4000": SUPERVISED | data_of("cifar10", 4000, 250),
    "supervised_cifar10_all": SUPERVISED | data_of("cifar10", "all", 250),
    "supervised_svhn_250": SUPERVISED | data_of("svhn", 250, 10),
    "supervised_svhn_1000": SUPERVISED | data_of("svhn", 1000, 10),
    "supervised_svhn_all": SUPERVISED | data_of("svhn", "all", 250),
    "supervised_cifar100_2500": SUPERVISED | data_of("cifar100", 2500, 250),
    "supervised_cifar100_10000": SUPERVISED | data_of("cifar100", 10000, 250),
    "supervised_cifar100_all": SUPERVISED | data_of("cifar100", "all", 250),
    "fedavg_cifar10": TABLE_4
    | {
        "model.class_path": "FedAvg",
        "model.network.widen_factor": 2,
        "model.prox_mu": 0.0,
        "model.server_epochs": 0,
        "model.keep_server_optimizer": False,
        "data.dataset": "cifar10",
        "data.num_labels": "all",
        "data.label_location": "clients",
    },
}
"""The settings behind SemiFL's Table 1, from its Table 4 and the authors' code."""


@pytest.mark.parametrize("name", PAPER)
def test_table_1_configs_hold_the_published_hyper_parameters(name: str) -> None:
    values = resolved(name)
    assert {key: values.get(key, "missing") for key in PAPER[name]} == PAPER[name]


@pytest.mark.parametrize(("name", "parameters"), [("semifl_svhn_250", 1_467_610), ("semifl_cifar100_2500", 23_401_012)])
def test_table_1_networks_have_the_published_size(name: str, parameters: int) -> None:
    cli = parsed(name, "--trainer.accelerator=cpu")
    cli.model.configure_model()
    assert sum(p.numel() for p in cli.model.parameters()) == parameters


FED_SHVR = {
    "model.class_path": "FedSHVR",
    "model.optimizer.class_path": "SGD",
    "model.optimizer.lr": 0.01,
    "model.optimizer.momentum": 0,
    "model.optimizer.weight_decay": 0,
    "model.schedule": None,
    "model.gradient_clip_norm": None,
    "model.alpha1": 0.75,
    "model.alpha2": 0.1,
    "model.client_epochs": 2,
    "model.control_variate": True,
    "model.averaging": "normalized",
    "data.client_batch_size": 32,
    "data.label_location": "clients",
    "data.weak": "none",
}
FED_SHVR_MNIST = FED_SHVR | {
    "trainer.max_rounds": 100,
    "trainer.clients_per_round": 10,
    "data.dataset": "mnist",
    "data.num_clients": 10,
    "data.num_labels": 600,
    "model.network.class_path": "MLP",
    "model.network.hidden": (5000,),
}
FED_SHVR_PAPER = {
    "fedshvr_mnist_iid": FED_SHVR_MNIST | {"data.partition.class_path": "Stratified"},
    "fedshvr_mnist_noniid": FED_SHVR_MNIST | {"data.partition.class_path": "LabeledClasses"},
    "fedshvr_mnist_noniid_dir01": FED_SHVR_MNIST | {"model.ramp_epochs": 50, "data.partition.alpha": 0.1},
    "fedshvr_cifar10_mismatch": FED_SHVR
    | {
        "trainer.max_rounds": 1000,
        "trainer.clients_per_round": 40,
        "data.dataset": "cifar10",
        "data.num_clients": 40,
        "data.num_labels": 4000,
        "data.partition.class_path": "ClassMismatch",
        "data.partition.num_unlabeled": 20000,
        "data.partition.alpha": 0.025,
        "model.network.class_path": "CNN13",
    },
}
"""The settings of Fed-SHVR's section V."""


@pytest.mark.parametrize("name", FED_SHVR_PAPER)
def test_fed_shvr_configs_hold_the_published_settings(name: str) -> None:
    values = resolved(name)
    assert {key: values.get(key, "missing") for key in FED_SHVR_PAPER[name]} == FED_SHVR_PAPER[name]


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


FEDRGD = {
    "model.class_path": "FedRGD",
    "model.optimizer.class_path": "SGD",
    "model.optimizer.momentum": 0.9,
    "model.optimizer.nesterov": True,
    "model.optimizer.weight_decay": 1e-4,
    "model.schedule.class_path": "FractionalCosine",
    "model.schedule.fraction": 7 / 16,
    "model.local_steps": 16,
    "model.objective": "crl",
    "model.threshold": 0.95,
    "model.server_replicas": "one",
    "model.regroup": "each_round",
    "model.keep_client_optimizer": True,
    "model.keep_server_optimizer": True,
    "data.label_location": "server",
    "data.partition.class_path": "ClassSkew",
    "data.partition.r": 0.4,
    "data.server_batch_size": 64,
    "data.client_batch_size": 64,
    "data.weak": "flip_crop",
    "data.strong": "fixmatch",
}


def fedrgd_of(dataset: str, users: int, drawn: int, labels: int, groups: Any, rounds: int, lr: float) -> dict[str, Any]:
    return FEDRGD | {
        "data.dataset": dataset,
        "data.num_clients": users,
        "data.num_labels": labels,
        "trainer.clients_per_round": drawn,
        "trainer.max_rounds": rounds,
        "model.groups": groups,
        "model.optimizer.lr": lr,
    }


FEDRGD_PAPER = {
    "fedrgd_cifar10": fedrgd_of("cifar10", 10, 10, 1000, 2, 19200, 0.165) | {"model.schedule.rounds": 12800},
    "fedrgd_svhn": fedrgd_of("svhn", 10, 10, 1000, 2, 2560, 0.165) | {"model.schedule.warmup_rounds": 320},
    "fedrgd_emnist_10": fedrgd_of("emnist", 47, 10, 4700, 2, 6400, 0.03),
    "fedrgd_emnist_30": fedrgd_of("emnist", 47, 30, 4700, 3, 6400, 0.03),
    "fedrgd_emnist_47": fedrgd_of("emnist", 47, 47, 4700, [10, 10, 10, 10, 7], 6400, 0.03),
    "fedrgd_stl10": fedrgd_of("stl10", 10, 2, 1000, 2, 19200, 0.165) | {"data.partition.r": 0.0},
    "fedrgd_cifar10_labels_at_clients": fedrgd_of("cifar10", 100, 5, 5000, 2, 200, 0.0075)
    | {"model.local_steps": 100, "data.label_location": "clients", "data.partition.r": 0.0},
}
"""The settings of FedRGD's Tables I and II, from its Table A.2 and the authors' code."""


@pytest.mark.parametrize("name", FEDRGD_PAPER)
def test_fedrgd_configs_hold_the_published_settings(name: str) -> None:
    values = resolved(name)
    assert {key: values.get(key, "missing") for key in FEDRGD_PAPER[name]} == FEDRGD_PAPER[name]


def in_steps(steps: int) -> dict[str, Any]:
    """300 epochs of 1,024 steps, with the authors' cosine, in rounds of so many steps."""
    return {
        "model.local_steps": steps,
        "trainer.max_rounds": 300 * 1024 // steps,
        "model.schedule.rounds": 200 * 1024 // steps,
        "model.schedule.warmup_rounds": 5 * 1024 // steps,
    }


BN_AND_FEDAVG: dict[str, Any] = {"model.network.norm": "batch", "model.groups": 1}
LABELLED_USERS: dict[str, Any] = {"data.num_labels": "all", "data.label_location": "clients"}
ELASTIC = (
    LABELLED_USERS
    | in_steps(8)
    | {"model.network.norm": "batch", "data.num_clients": 16, "trainer.clients_per_round": 16}
)

SEMI_SFL = {
    "model.optimizer.class_path": "SGD",
    "model.optimizer.lr": 0.02,
    "model.optimizer.momentum": 0.9,
    "model.optimizer.nesterov": True,
    "model.optimizer.weight_decay": 5e-4,
    "model.schedule.class_path": "Cosine",
    "model.schedule.final": 0.25,
    "model.keep_client_optimizer": False,
    "model.keep_server_optimizer": False,
    "model.gradient_clip_norm": None,
    "model.client_weighting": "uniform",
    "model.client_steps": 50,
    "model.threshold": 0.95,
    "model.teacher_decay": 0.99,
    "model.test_model": "teacher",
    "trainer.max_rounds": 1000,
    "trainer.clients_per_round": 10,
    "data.num_clients": 30,
    "data.label_location": "server",
    "data.server_batch_size": 64,
    "data.client_batch_size": 64,
    "data.weak": "flip_crop",
    "data.strong": "fixmatch",
    "data.validation": "test",
}
SEMI_SFL_SETS: dict[str, dict[str, Any]] = {
    "svhn_1000": {
        "data.dataset": "svhn", "data.num_labels": 1000, "model.network.class_path": "SVHNCNN", "model.split": 2,
        "model.server_views": "weak",
    },
    "cifar10_4000": {
        "data.dataset": "cifar10", "data.num_labels": 4000, "model.network.class_path": "AlexNet", "model.split": 5,
        "model.server_views": "strong", "model.network.width": 64, "model.network.dropout": 0.5,
    },
}  # fmt: skip
SEMI_SFL_METHODS: dict[str, dict[str, Any]] = {
    "semisfl": {
        "model.class_path": "SemiSFL", "model.server_steps": None, "model.client_teacher_decay": None,
        "model.clustering": 1.0, "model.supervised_contrastive": 1.0, "model.temperature": 0.2, "model.queue_every": 10,
        "model.projection_size": 128, "model.head_width": None, "model.queue_clear": "never", "model.own_key": True,
        "model.queue_empty": "masked", "model.queue_confidence": "true",
    },
    "fedswitchsl": {"model.class_path": "FedSwitchSL", "model.server_steps": 50, "model.client_teacher_decay": 0.99},
}  # fmt: skip
SEMI_SFL_PAPER = [
    (method, images, split) for method in SEMI_SFL_METHODS for images in SEMI_SFL_SETS for split in ("", "_dir01")
]
"""The settings behind Semi-SFL's Tables II and IV, from section V and the authors' code."""


@pytest.mark.parametrize(("method", "images", "split"), SEMI_SFL_PAPER)
def test_semi_sfl_configs_hold_the_published_settings(method: str, images: str, split: str) -> None:
    values = resolved(f"{method}_{images}{split}")
    expected = SEMI_SFL | SEMI_SFL_SETS[images] | SEMI_SFL_METHODS[method]
    expected["data.partition.class_path"] = "ClientDirichlet" if split else "Iid"
    if split:
        expected["data.partition.alpha"] = 0.1
    if method == "semisfl":
        expected["model.queue_size"] = 640 if images == "cifar10_4000" else 2048
    assert {key: values.get(key, "missing") for key in expected} == expected


@pytest.mark.parametrize("images", ["digits", "mnist", "svhn_1000", "cifar10_4000"])
def test_the_ablation_of_clustering_differs_in_the_method_alone(images: str) -> None:
    twin, method = resolved(f"fedswitchsl_{images}"), resolved(f"semisfl_{images}")
    same = ("data", "model.network", "model.optimizer", "model.schedule", "model.split", "model.client_steps", "seed")
    keys = [key for key in method if key.startswith((*same, "trainer.max", "trainer.clients_per"))]
    assert {key: twin[key] for key in keys} == {key: method[key] for key in keys}


CHANGES: dict[str, dict[str, Any]] = {
    "ablations/system": {
        "trainer.system.class_path": "SystemModel",
        "trainer.system.devices": [
            {"name": "fast", "seconds": 0.05, "std": 0.01, "share": 1.0},
            {"name": "slow", "seconds": 0.15, "std": 0.03, "share": 1.0},
        ],
        "trainer.system.per": "step",
        "trainer.system.download_mbit_s": (10.0, 20.0),
        "trainer.system.upload_mbit_s": (2.0, 8.0),
        "trainer.system.server_step_s": 0.01,
    },
    "presets/semisfl_code": {
        "model.server_steps": 50,
        "model.teacher_decay": 0.984,
        "model.queue_clear": "every_step",
        "model.queue_empty": "count",
        "model.queue_confidence": "always",
    },
    "presets/semisfl_paper": {"model.client_teacher_decay": 0.99, "model.own_key": False},
    "presets/semifl_code": {"trainer.callbacks.StaticBatchNorm.average": "batches"},
    "presets/semifl_paper": {
        "trainer.callbacks.StaticBatchNorm.source": "moments",
        "trainer.callbacks.StaticBatchNorm.average": "exact",
        "model.server_phase": "before",
        "model.soft_labels": True,
        "model.mix_order": "images",
        "model.mix_resample": "round",
        "model.gradient_clip_norm": None,
        "model.keep_client_optimizer": False,
        "model.keep_server_optimizer": False,
        "data.strong": "fixmatch",
    },
    "ablations/fedshvr_crops": {"data.weak": "crop"},
    "ablations/fedshvr_literal": {"model.r2": "to_uniform", "model.label_alpha0": "ramped"},
    "ablations/fedshvr_ramped_labels": {"model.label_alpha0": "ramped"},
    "ablations/table2_vanilla": {
        "model.server_phase": "parallel",
        "model.pseudo_label_source": "local",
        "model.mix_weight": 0.0,
    },
    "ablations/table2_global_labels": {"model.server_phase": "parallel", "model.mix_weight": 0.0},
    "ablations/table2_finetune": {"model.pseudo_label_source": "local", "model.mix_weight": 0.0},
    "ablations/table3_sbn_server": {"trainer.callbacks.StaticBatchNorm.source": "server"},
    "ablations/table5_e1": {"model.client_epochs": 1},
    "ablations/table5_no_mix": {"model.mix_weight": 0.0},
    "ablations/table5_momentum0": {"model.server_momentum": 0.0},
    "presets/fedrgd_code": {"model.server_replicas": "per_group", "model.regroup": "slots"},
    "presets/fedrgd_paper": {
        "model.optimizer.lr": 0.146,
        "model.schedule.fraction": 2.3,
        "model.schedule.rounds": None,
        "model.schedule.floor": 1e-4,
    },
    "ablations/fedrgd_crl_gn": {"model.groups": 1},
    "ablations/fedrgd_crl_bn": BN_AND_FEDAVG,
    "ablations/fedrgd_self_training": BN_AND_FEDAVG
    | {"model.objective": "self_training", "model.optimizer.lr": 0.03, "model.schedule.warmup_rounds": 0.0},
    "ablations/fedrgd_supervised": BN_AND_FEDAVG
    | LABELLED_USERS
    | {"model.objective": "supervised", "data.partition.server_images": 1000},
    "ablations/fedrgd_table3_fedavg": BN_AND_FEDAVG
    | LABELLED_USERS
    | in_steps(32)
    | {"model.objective": "supervised", "data.partition.r": 0.29},
    "ablations/fedrgd_table3_data_sharing": LABELLED_USERS
    | in_steps(32)
    | {
        "model.class_path": "DataSharing",
        "model.network.norm": "batch",
        "model.share": 1.0,
        "model.warmup_rounds": 160,
        "model.keep_client_optimizer": False,
        "data.partition.r": 0.29,
        "data.partition.server_images": 1000,
    },
    "ablations/fedrgd_table4_easgd": ELASTIC | {"model.class_path": "EASGD", "model.alpha": None},
    "ablations/fedrgd_table4_overlap_sgd": ELASTIC
    | {"model.class_path": "OverlapSGD", "model.alpha": 0.6, "model.beta": 0.7},
}
"""What each overlay changes in its base, beside the run's folder."""


@pytest.mark.parametrize("name", [name for name, path in CONFIGS.items() if path.parent != FOLDER])
def test_overlay_changes_these_keys_and_no_other(name: str) -> None:
    base, values = resolved(base_of(name)), resolved(name)
    added = values.keys() ^ base.keys()
    assert added <= {"trainer.system", *CHANGES[name]} or base["model.class_path"] != values["model.class_path"]
    changed = {key: value for key, value in values.items() if value != base.get(key, "missing")}
    for key in ("trainer.default_root_dir", "config"):
        changed.pop(key, None)
    assert changed == CHANGES[name]


@pytest.mark.parametrize("name", [name for name in PAPER if name.startswith("supervised") and not name.endswith("all")])
def test_partially_supervised_bound_has_the_split_of_its_method(name: str) -> None:
    bound, method = resolved(name), resolved(name.replace("supervised", "semifl"))
    same = ("dataset", "num_clients", "num_labels", "label_location", "partition.class_path", "validation", "root")
    keys = [f"data.{key}" for key in same]
    keys += [key for key in method if key.startswith("model.network")]
    assert {key: bound[key] for key in keys} == {key: method[key] for key in keys}


@pytest.mark.parametrize("dataset", ["digits", "mnist", "fashionmnist", "cifar10_500"])
def test_bound_of_a_small_config_differs_in_the_method_alone(dataset: str) -> None:
    bound, method = resolved(f"supervised_{dataset}"), resolved(f"semifl_{dataset}")
    keys = [key for key in method if key.startswith(("data", "model.network", "model.schedule", "seed"))]
    assert {key: bound[key] for key in keys} == {key: method[key] for key in keys}
