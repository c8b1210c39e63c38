from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import (
    EASGD,
    FL2,
    SAGE,
    SCAFFOLD,
    UDA,
    CBAFed,
    FedAvg,
    FedDB,
    FedMatch,
    FedRGD,
    FedSHVR,
    FedSwitch,
    FedSwitchSL,
    FixMatch,
    MeanTeacher,
    OverlapSGD,
    ProxyFL,
    PseudoLabel,
    RSCFed,
    SelfTraining,
    SemiFL,
    SemiSFL,
    Supervised,
)
from lightning_fedssl.callbacks import GlobalUpdateFrequency
from lightning_fedssl.data import FederatedDataModule, FullyLabeledClients, LabeledClasses, LocalData, Partition
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.data.partition.federated_split import ClientIndices, FederatedSplit, SplitRequest
from lightning_fedssl.functional.optimizers import FedOpt, half_momentum
from lightning_fedssl.local_work import LocalWork, labeled_work
from lightning_fedssl.models import Network
from lightning_fedssl.state import ClientUpdate, ServerState
from lightning_fedssl.task import Classification, MultiLabel, Regression, Segmentation, Task
from tests.toy import (
    Method,
    ToyData,
    data_of,
    labeled_clients,
    toy,
    toy_fedavg,
    toy_of,
    toy_round,
    toy_semifl,
    toy_trainer,
    weights,
)

SMALL: dict[str, Any] = {"server_steps": 3, "client_steps": 4, "threshold": 0.36}


def toy_semi_sfl(**kwargs: Any) -> SemiSFL:
    """Semi-SFL on a small CNN with batch norm; queues smaller than a step's keys."""
    return toy(SemiSFL, "batch", **SMALL | {"queue_size": 12, "queue_every": 2, "projection_size": 6} | kwargs)


def toy_fedswitch_sl(**kwargs: Any) -> FedSwitchSL:
    """FedSwitch-SL on a small CNN, some of whose clients are on the teacher and some on the student."""
    return toy(FedSwitchSL, "batch", **SMALL | {"beta": 0.01} | kwargs)


def adaptive_semi_sfl() -> SemiSFL:
    """With K_s adapted at rounds 2 and 4."""
    return toy(AdaptsEarly, "batch", **SMALL | {"queue_size": 12, "server_steps": None, "client_teacher_decay": 0.9})


def toy_fl2(**kwargs: Any) -> FL2:
    """(FL)^2 on a small CNN, some of whose labels are sure from the first round on."""
    algorithm: FL2 = toy_semifl(FL2, **{"pretrain_epochs": 3} | kwargs)
    return algorithm


class AdaptsEarly(SemiSFL):
    """Semi-SFL for runs of five rounds."""

    def configure_callbacks(self) -> Any:
        """A quick adaptation in the place of the published one."""
        others = [c for c in super().configure_callbacks() if not isinstance(c, GlobalUpdateFrequency)]
        return [*others, GlobalUpdateFrequency(start=4, milestones=(2, 4), window=1, rho_1=1e-6, rho_2=1e-3)]


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def toy_shvr(**kwargs: Any) -> FedSHVR:
    return toy(FedSHVR, "group", **{"optimizer": plain_sgd, "ramp_epochs": 0} | kwargs)


def uneven_clients(**kwargs: Any) -> ToyData:
    """Four clients with 6 labels of two classes each and very unequal numbers of unlabelled images."""
    given: dict[str, Any] = {"num_labels": 24, "label_location": "clients", "partition": LabeledClasses(alpha=0.3)}
    return ToyData(**given | kwargs)


def toy_fedmatch(**kwargs: Any) -> FedMatch:
    given: dict[str, Any] = {"optimizer": plain_sgd, "threshold": 0.4, "l2_weight": 0.1, "helper_interval": 2}
    return toy(FedMatch, "none", **given | kwargs)


def toy_fedswitch(method: type[FedSwitch] = FedSwitch, **kwargs: Any) -> FedSwitch:
    return toy(method, "batch", **{"threshold": 0.4, "client_steps": 4, "server_steps": 3} | kwargs)


class ByNumber(FedSwitch):
    """Clients with an odd number take the teacher."""

    def prefers_teacher(self, data: LocalData) -> bool:
        return data.party % 2 == 1


def toy_fixmatch(**kwargs: Any) -> FixMatch:
    return toy(FixMatch, **{"threshold": 0.4} | kwargs)


def mixed_clients(**kwargs: Any) -> ToyData:
    """Clients with labelled and unlabelled images."""
    return ToyData(**{"label_location": "clients", "num_labels": 24} | kwargs)


def toy_uda(**kwargs: Any) -> UDA:
    return toy(UDA, **{"threshold": 0.4} | kwargs)


def toy_self_training(**kwargs: Any) -> SelfTraining:
    given: dict[str, Any] = {"optimizer": plain_sgd, "init_head": "labels"}
    return toy(SelfTraining, **given | kwargs)


def toy_sage(**kwargs: Any) -> SAGE:
    """SAGE whose received model and model in training have different batch-norm statistics."""
    return toy(SAGE, "batch", **{"threshold": 0.4, "client_epochs": 1} | kwargs)


def toy_proxyfl(**kwargs: Any) -> ProxyFL:
    return toy(ProxyFL, "batch", **{"threshold": 0.4, "client_epochs": 2, "proxy_epochs": 2} | kwargs)


def toy_mean_teacher(**kwargs: Any) -> MeanTeacher:
    given: dict[str, Any] = {"optimizer": plain_sgd, "ramp_epochs": 0, "alpha0": 5.0}
    return toy(MeanTeacher, "batch", **given | kwargs)


class WithDropout(Network):
    """A linear classifier that forgets half of what it sees."""

    def __init__(self, num_classes: int = 3, in_shape: tuple[int, int, int] = (1, 8, 8)) -> None:
        super().__init__()
        self.classifier = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(F.dropout(x.flatten(1), 0.5, self.training))
        return logits


def toy_pseudo_label(**kwargs: Any) -> PseudoLabel:
    return toy(PseudoLabel, "group", **{"optimizer": plain_sgd, "ramp_epochs": 4} | kwargs)


def toy_easgd(kind: Any = EASGD, **kwargs: Any) -> Any:
    return toy(kind, "batch", **{"local_steps": 3} | kwargs)


def toy_rgd(**kwargs: Any) -> FedRGD:
    return toy(FedRGD, "batch", **{"threshold": 0.34, "local_steps": 3} | kwargs)


def fully_labeled(**kwargs: Any) -> ToyData:
    """Two clients with labels for all of their images, and two without a label."""
    return labeled_clients(**{"partition": FullyLabeledClients(2)} | kwargs)


def toy_rscfed(**kwargs: Any) -> RSCFed:
    return toy(RSCFed, **{"sub_consensus": 2, "unlabeled_weight": 2, "distance_scale": 10} | kwargs)


def toy_cbafed(**kwargs: Any) -> CBAFed:
    """CBAFed whose labelled clients have no residual connection in a round, so that clients may be stacked."""
    given: dict[str, Any] = {"threshold": 0.4, "warmup_epochs": 2, "client_epochs": 2, "rare_share": 0.09}
    return toy(CBAFed, **given | {"keep_client_optimizer": False} | kwargs)


def toy_feddb(**kwargs: Any) -> FedDB:
    return toy(FedDB, **{"threshold": 0.4, "client_epochs": 2} | kwargs)


def toy_supervised() -> Supervised:
    return toy(Supervised)


def toy_scaffold(**kwargs: Any) -> SCAFFOLD:
    return toy(SCAFFOLD, **{"optimizer": plain_sgd} | kwargs)


def momentum_of(algorithm: Any) -> dict[str, torch.Tensor]:
    """The momentum of the aggregation's optimizer by the names of the weights; empty before its first step."""
    state = algorithm.server.extra.get("optimizer.aggregation", {})
    return dict(zip(algorithm.server.parameters, state.values(), strict=bool(state)))


def task_method(method: Any, task: Task, label_location: str = "server", **kwargs: Any) -> Any:
    return partial(toy_of, method, task, **kwargs), partial(data_of, task, label_location=label_location)


ADAM = {"optimizer": torch.optim.AdamW, "aggregation_optimizer": FedOpt, "keep_client_optimizer": True}
METHODS: dict[str, Any] = {
    "semifl": (toy_semifl, ToyData),
    "fl2": (toy_fl2, ToyData),
    "semifl_paper": (lambda: toy_semifl(server_phase="before", soft_labels=True, keep_client_optimizer=False), ToyData),
    "fedavg_momentum": (
        lambda: toy_fedavg(aggregation_optimizer=half_momentum, keep_client_optimizer=True),
        labeled_clients,
    ),
    "scaffold": (toy_scaffold, labeled_clients),
    "fedavg_adam": (partial(toy_fedavg, **ADAM), labeled_clients),
    "supervised": (toy_supervised, ToyData),
    "fedrgd": (toy_rgd, ToyData),
    "fedrgd_at_clients": (lambda: toy_rgd(objective="self_training"), partial(labeled_clients, num_labels=30)),
    "easgd": (toy_easgd, labeled_clients),
    "overlap_sgd": (lambda: toy_easgd(OverlapSGD), labeled_clients),
    "fedrgd_replicas": (lambda: toy_rgd(groups=3, server_replicas="per_group"), ToyData),
    "fed_shvr": (toy_shvr, uneven_clients),
    "fed_shvr_step": (lambda: toy_shvr(label_refresh="step"), uneven_clients),
    "fed_shvr_dropout": (lambda: toy_shvr(network=WithDropout), uneven_clients),
    "fedmatch_server": (toy_fedmatch, ToyData),
    "fedmatch_clients": (lambda: toy_fedmatch(lr_patience=1), mixed_clients),
    "fedswitch": (lambda: toy_fedswitch(ByNumber), ToyData),
    "fixmatch": (lambda: toy_fixmatch(server_phase="before", prox_mu=0.1), ToyData),
    "uda": (toy_uda, ToyData),
    "self_training": (toy_self_training, ToyData),
    "sage": (toy_sage, mixed_clients),
    "proxyfl": (toy_proxyfl, mixed_clients),
    "fixmatch_clients": (lambda: toy_fixmatch(keep_client_optimizer=True), mixed_clients),
    "pseudo_label": (toy_pseudo_label, uneven_clients),
    "mean_teacher": (toy_mean_teacher, uneven_clients),
    "semi_sfl": (toy_semi_sfl, ToyData),
    "semi_sfl_adaptive": (adaptive_semi_sfl, ToyData),
    "semi_sfl_momentum": (lambda: toy_semi_sfl(keep_client_optimizer=True, keep_server_optimizer=True), ToyData),
    "fedswitch_sl": (toy_fedswitch_sl, ToyData),
    "rscfed": (toy_rscfed, fully_labeled),
    "cbafed": (toy_cbafed, fully_labeled),
    "feddb": (toy_feddb, mixed_clients),
    "semifl_masks": task_method(SemiFL, Segmentation(), threshold=0.5),
    "fl2_labels": task_method(FL2, MultiLabel(), threshold=0.5, pretrain_epochs=1),
    "mean_teacher_numbers": task_method(MeanTeacher, Regression(), ramp_epochs=0, label_location="clients"),
}
STATED: dict[str, Any] = {
    "0": {"a": 0.6, "b": 0.3, "c": 0.1},
    "1": {"a": "about a fifth", "b": "60 %", "c": "1/5"},
    "3": {"a": 2, "b": 1, "c": 17},
}
"""Class shares of three of four clients: exact, rough and counted."""


METHODS |= {
    f"{name}_shares": (METHODS[name][0], partial(METHODS[name][1], class_shares=STATED))
    for name in ("self_training", "semifl", "fixmatch", "sage")
}


METHODS = {name: (make, partial(data, max_train_images=72)) for name, (make, data) in METHODS.items()}


STATELESS = {
    "cbafed",
    "semifl_paper", "supervised", "fedswitch", "fixmatch", "uda", "sage", "proxyfl", "pseudo_label",
    "mean_teacher", "mean_teacher_numbers", "self_training",
}  # fmt: skip


STATEFUL = [name for name in METHODS if name not in STATELESS]


HAND_SPEC = DatasetSpec("mnist", 2, (1, 4, 4), (0.5,), (0.25,), ("dark", "bright"))


LEVELS = torch.tensor([40, 210, 70, 190], dtype=torch.uint8)


class HandData(ToyData):
    """Four grey images: two labelled at the server, one at each of two clients; views are the images themselves."""

    def __init__(self, **kwargs: Any) -> None:
        settings = {"num_clients": 2, "num_labels": 2, "validation": 0, "weak": "none", "strong": "none"}
        super().__init__(**settings | kwargs)
        self.spec = HAND_SPEC

    def _load(self) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
        split = ImageSplit(LEVELS.reshape(4, 1, 1, 1).expand(4, 1, 4, 4).clone(), torch.tensor([0, 1, 0, 1]))
        return HAND_SPEC, split, split

    def mean_input(self, index: int) -> float:
        """What Line sees of an image in 64 bits: its normalised grey level."""
        level = self.inputs.views(torch.float64).plain(
            self._train.images[index : index + 1], torch.zeros(0, dtype=torch.int64)
        )[0, 0, 0, 0]
        assert float(level) == pytest.approx((float(LEVELS[index]) / 255 - 0.5) / 0.25, rel=1e-6)
        return float(level)


def hand_gradient(w: float, b: float, x: float, y: int) -> tuple[float, float]:
    """Gradient of cross-entropy of the logits (w x, b): (p_0 - [y=0]) x and p_1 - [y=1]."""
    p_bright = 1 / (1 + math.exp(w * x - b))
    return (1 - p_bright - (y == 0)) * x, p_bright - (y == 1)


class Silent:
    def client_started(self, data: LocalData, work: LocalWork, sizes: dict[str, int], received: Any) -> None:
        return

    def client_ended(self, update: ClientUpdate) -> None:
        return


def fitted(tmp_path: Path, algorithm: Any, data: ToyData, **kwargs: Any) -> dict[str, Tensor]:
    given: dict[str, Any] = {"clients_per_round": data.num_clients, "logger": False, "precision": "64-true"}
    trainer = toy_trainer(tmp_path, **given | kwargs)
    trainer.fit(algorithm, data)
    assert trainer.state.status == TrainerStatus.FINISHED, f"a signal stopped the run after round {trainer.round_index}"
    return weights(algorithm)


class Given(Partition):
    """Clients without labels, without unlabelled images, with both, and maybe with nothing."""

    def __init__(self, empty: bool = False) -> None:
        self.empty = empty

    def split(self, asked: SplitRequest, generator: np.random.Generator) -> FederatedSplit:
        rows = (asked.labels >= 0).nonzero()[:, 0]
        parts = [(rows[:12], rows[:0]), (rows[:0], rows[12:40]), (rows[40:46], rows[46:80])]
        parts += [(rows[:0], rows[:0])] if self.empty else [(rows[80:82], rows[82:85])]
        return FederatedSplit(0, rows[:0], [ClientIndices(*part) for part in parts])


def ready(algorithm: Method, data: FederatedDataModule) -> tuple[Method, FederatedDataModule]:
    """A method in round 1 with its initial weights, and its data."""
    data.setup()
    algorithm.check_data(data)
    algorithm.configure_model()
    algorithm.server = ServerState.from_module(algorithm, algorithm.local_modules)
    algorithm.current_round = toy_round()
    return algorithm, data


def started(algorithm: FederatedAlgorithm, data: FederatedDataModule, client: int = 0) -> tuple[LocalWork, LocalData]:
    """A client's work in round 1, from the initial weights, and what it holds."""
    _, data = ready(algorithm, data)
    local = data.local_data(client, 1)
    return algorithm.on_client_start(local), local


class LabeledSteps(FedAvg):
    """FedAvg with a number of steps."""

    def on_client_start(self, data: LocalData) -> LocalWork:
        return labeled_work(data, steps=7)


CONFIDENT_TASKS = [Classification(), MultiLabel(), Segmentation()]


def outcomes(task: Task, z: Tensor) -> Tensor:
    """Log-probabilities of the outcomes of each entry: ``(n, *entries, outcomes)``."""
    if isinstance(task, MultiLabel):  # absent, present
        return -torch.stack([(1 + z.exp()).log(), (1 + (-z).exp()).log()], dim=-1)
    z = z.movedim(1, -1)
    return z - z.exp().sum(-1, keepdim=True).log()


def loss_of(log_p: Tensor, y: Tensor) -> Tensor:
    """Minus the log-probability of each entry's outcome; that of a missing one has no meaning."""
    return -log_p.gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
