"""What holds for every method: hidden labels are not read, clients are independent, stacking changes rounding alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import (
    EASGD,
    FL2,
    SAGE,
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
    PseudoLabel,
    RSCFed,
    SemiFL,
    SemiSFL,
    Supervised,
)
from lightning_fedssl.local_training import sequential
from lightning_fedssl.models import CNN
from lightning_fedssl.state import ServerState
from lightning_fedssl.system import Device, SystemModel
from lightning_fedssl.task import Classification, Segmentation
from tests.algorithms.helpers import (
    METHODS,
    Given,
    Silent,
    fitted,
    plain_sgd,
    toy_fedmatch,
    toy_fixmatch,
    toy_mean_teacher,
    toy_pseudo_label,
    toy_shvr,
)
from tests.toy import ToyData, assert_same, labeled_clients, toy_round, toy_trainer, weights

DEVICES = SystemModel([Device("a", 1.0, 0.1)])
SUPERVISED = ("fedavg", "scaffold", "supervised", "easgd", "overlap_sgd")
STACKED = [
    name for name in METHODS if name not in ("supervised", "fed_shvr_dropout", "fedavg_adam") and "_sl" not in name
]
STACKED = [name for name in STACKED if not name.startswith("semi_sfl")]


class Spied(torch.nn.CrossEntropyLoss):
    """Counts the steps that it trains."""

    def __init__(self) -> None:
        super().__init__(reduction="none")
        self.steps = 0

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.steps += outputs.requires_grad
        return super().forward(outputs, targets)


@pytest.mark.parametrize("method", METHODS)
def test_hidden_labels_and_simulated_devices_change_no_weight(tmp_path: Path, method: str) -> None:
    make, build = METHODS[method]
    results = []
    for scramble in (False, True):
        algorithm, data = make(), build()
        if isinstance(data.task, (Classification, Segmentation)):
            data.task = type(data.task)(criterion=Spied)
        data.setup("fit")
        hidden = torch.cat([client.unlabeled for client in data.split.clients]).unique()
        assert len(hidden) > 10 or method.startswith(SUPERVISED)
        if scramble:
            train: Any = data._train
            labels = train.labels.clone()
            labels[hidden] = (labels[hidden] + 1) % 3
            data._train = replace(train, labels=labels)
        system = DEVICES if scramble else None
        toy_trainer(tmp_path / str(scramble), max_rounds=2, logger=False, system=system).fit(algorithm, data)
        results.append(weights(algorithm))
        spied = getattr(algorithm.task, "_losses", None)
        assert spied is None or spied.steps > 0, "true labels train by the task's loss"
    assert_same(*results)


@pytest.mark.parametrize("method", METHODS)
def test_initial_weights_are_a_function_of_the_seed_and_draw_no_number_of_the_user_s(method: str) -> None:
    states = []
    for number in (1, 2):
        torch.manual_seed(number)
        before, algorithm = torch.get_rng_state(), METHODS[method][0]()
        algorithm.configure_model()
        assert torch.equal(torch.get_rng_state(), before)
        states.append(algorithm.state_dict())
    assert_same(*states)


@pytest.mark.parametrize("method", STACKED)
def test_stacked_clients_train_as_sequential_ones_do(tmp_path: Path, method: str) -> None:
    make, data = METHODS[method]
    results, times = [], []
    for number in (1, 3):
        algorithm = make()
        options: dict[str, Any] = {"clients_at_once": number, "max_rounds": 2, "precision": "64-true", "logger": False}
        trainer = toy_trainer(tmp_path, system=DEVICES, **options)
        trainer.fit(algorithm, data())
        assert not trainer.run.local_training.refusal
        results.append(weights(algorithm))
        times.append({name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith("system/")})
    assert times[0] == times[1]
    for name, t in results[0].items():
        torch.testing.assert_close(results[1][name], t, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", ["fed_shvr", "fedmatch_clients", "fedswitch", "fixmatch", "mean_teacher", "sage"])
def test_a_client_trains_alike_alone_and_after_others(method: str) -> None:
    make, build = METHODS[method]
    results: list[dict[str, torch.Tensor]] = []
    for order in ([2], [0, 1, 2]):
        algorithm, data = make(), build()
        if method == "fedmatch_clients":
            algorithm = toy_fedmatch(lr_patience=None)
        data.setup()
        algorithm.check_data(data)
        algorithm.configure_model()
        algorithm.server = ServerState.from_module(algorithm, algorithm.local_modules)
        algorithm.current_round = toy_round()
        for k in range(4) if method == "fed_shvr" else ():
            algorithm.clients.put(k, "control", {n: 0.01 * k * p for n, p in algorithm.server.parameters.items()})
        clients = [data.local_data(k, 1) for k in order]
        optimizer = plain_sgd(p for p in algorithm.parameters() if p.requires_grad)
        phase = sequential.ClientPhase(algorithm, optimizer, Fabric(accelerator="cpu"), Silent())
        updates = sequential.train_clients(phase, clients)
        results.append([{n: p.clone() for n, p in {**u.parameters, **u.buffers}.items()} for u in updates][-1])
    assert_same(*results)


@pytest.mark.parametrize("make", [toy_fixmatch, toy_shvr, toy_mean_teacher, toy_pseudo_label, toy_fedmatch])
def test_clients_with_labelled_images_with_unlabelled_ones_and_with_none_are_trained(
    tmp_path: Path, make: Callable[..., FederatedAlgorithm]
) -> None:
    algorithm, start = make(), make()
    start.configure_model()
    data = ToyData(partition=Given(empty=True), label_location="clients", num_labels=18)
    found = fitted(tmp_path, algorithm, data, max_rounds=2)
    assert all(torch.isfinite(t).all() for t in found.values())
    assert any(not torch.equal(t, start.state_dict()[name].to(t)) for name, t in found.items())


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        (FedAvg, {"prox_mu": -1}), (FedAvg, {"server_weight": 2}),
        (FedAvg, {"aggregation_optimizer": partial(torch.optim.SGD, lr=-1)}),
        (FedAvg, {"client_epochs": 0}), (FedAvg, {"server_epochs": -1}), (FedAvg, {"gradient_clip_norm": 0}),
        (SemiFL, {"threshold": 1.1}), (SemiFL, {"mixup_alpha": 0}), (SemiFL, {"mix_weight": -1}),
        (FL2, {"rho": -1}), (FL2, {"eta": 0}), (FL2, {"pretrain_epochs": -1}), (SAGE, {"half_gap": 0}),
        (RSCFed, {"temperature": 0}), (RSCFed, {"sub_consensus": 0}), (RSCFed, {"labeled_factor": 0}),
        (RSCFed, {"distance_scale": -1}), (RSCFed, {"unlabeled_weight": -1}), (RSCFed, {"teacher_decay": 1}),
        (RSCFed, {"client_weighting": "uniform"}),
        (CBAFed, {"warmup_rounds": 0}), (CBAFed, {"unlabeled_weight": -1}), (CBAFed, {"client_epochs": 1.5}),
        (FedDB, {"threshold": 1.1}), (Supervised, {"server_steps": 0}),
        (FixMatch, {"threshold": -0.1}), (FixMatch, {"unlabeled_weight": -1}), (FixMatch, {"labeled_weight": -1}),
        (FixMatch, {"unlabeled_ratio": 0}), (FixMatch, {"server_steps": 0}), (FixMatch, {"client_steps": -1}),
        (UDA, {"temperature": 0}), (FedSwitch, {"beta": -1}), (FedSwitch, {"teacher_decay": 1}),
        (FedSwitch, {"client_teacher_decay": -0.1}), (FedSwitch, {"server_phase": "before"}),
        (FedMatch, {"lr_patience": 0}), (FedMatch, {"helper_interval": 0}), (FedMatch, {"l1_threshold": -1}),
        (FedMatch, {"threshold": 1.1}), (FedMatch, {"labeled_weight": -1}), (FedMatch, {"l2_weight": -1}),
        (FedMatch, {"delta_threshold": -1}), (FedMatch, {"optimizer": torch.optim.AdamW}), (FedMatch, {"freeze": "*"}),
        (FedRGD, {"threshold": 1.1}), (FedRGD, {"groups": 0}), (FedRGD, {"groups": [3, 0]}),
        (FedRGD, {"server_votes": 0}),
        (FedRGD, {"server_only_rounds": -1}), (FedRGD, {"consistency_weight": -1}), (FedRGD, {"local_steps": 0}),
        (FedRGD, {"client_epochs": 2}), (EASGD, {"alpha": 0}), (EASGD, {"alpha": 1.1}), (OverlapSGD, {"beta": 1}),
        (MeanTeacher, {"decay": 1}),
        (PseudoLabel, {"alpha0": -1}), (PseudoLabel, {"ramp_epochs": -1}), (FedSHVR, {"alpha1": -1}),
        (FedSHVR, {"alpha2": -1}), (FedSHVR, {"optimizer": torch.optim.AdamW}), (SemiSFL, {"server_steps": 0}),
        (SemiSFL, {"client_steps": -1}), (SemiSFL, {"queue_size": 0}), (SemiSFL, {"temperature": 0}),
        (SemiSFL, {"threshold": 1.1}), (SemiSFL, {"client_teacher_decay": 1}), (SemiSFL, {"projection_size": 0}),
        (SemiSFL, {"client_epochs": 2}), (SemiSFL, {"clustering": -1}), (FedSwitchSL, {"beta": -1}),
    ],
)  # fmt: skip
def test_an_impossible_argument_is_refused_by_its_key(method: type[Any], wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^model\.({next(iter(wrong))}|local_steps)( is |: )"):
        method(network=CNN, **wrong)


@pytest.mark.parametrize(
    ("make", "data", "key"),
    [
        (FedAvg, ToyData, "label_location"), (SemiFL, labeled_clients, "label_location"),
        (SemiFL, partial(ToyData, num_labels="all"), "num_labels"), (FedSwitch, labeled_clients, "label_location"),
        (FixMatch, partial(ToyData, num_labels="all"), "num_labels"), (FedSHVR, ToyData, "label_location"),
        (FedMatch, partial(ToyData, num_labels="all"), "num_labels"), (EASGD, ToyData, "label_location"),
        (SAGE, ToyData, "label_location"), (FedDB, ToyData, "label_location"),
        (FedMatch, partial(ToyData, validation=0), "lr_patience"),
        (SemiSFL, labeled_clients, "label_location"),
        (FedRGD, partial(ToyData, num_labels="all"), "num_labels"), (Supervised, labeled_clients, "label_location"),
        (partial(FedRGD, objective="supervised"), ToyData, "label_location"),
        (partial(SemiSFL, queue_size=3), ToyData, "queue_size"),
        (partial(FedRGD, server_only_rounds=1), partial(labeled_clients, num_labels=30), "server_only_rounds"),
        (partial(FixMatch, server_phase="parallel", server_epochs=0), ToyData, "server_phase"),
        (partial(FixMatch, server_phase="parallel"), partial(labeled_clients, num_labels=30), "server_phase"),
    ],
)  # fmt: skip
def test_data_that_a_method_cannot_train_on_are_refused_by_the_key(make: Any, data: Any, key: str) -> None:
    given = data()
    given.setup("fit")
    with pytest.raises(ValueError, match=rf"(data|model)\.{key}\b"):
        make(network=CNN).check_data(given)


@pytest.mark.parametrize("make", [MeanTeacher, FedSwitch, SemiSFL, FedSwitchSL, FedMatch, FedRGD])
def test_static_batch_norm_is_refused_where_nothing_measures_its_statistics(make: Any) -> None:
    network = partial(CNN, width=4, norm="static_batch")
    with pytest.raises(ValueError, match=r"^model\.network has norm static_batch, but "):
        make(network=network, num_classes=3, in_shape=(1, 8, 8)).configure_model()
