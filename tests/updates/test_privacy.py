"""Central differential privacy through the real trainer: clip, noise, neighbours, attacks, budget and refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install .[privacy]")

from scipy.stats import norm

from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import FederatedCheckpoint, StaticBatchNorm
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.datasets import DatasetSpec, ImageSplit
from lightning_fedssl.data.partition.natural import NaturalClients
from lightning_fedssl.data.sources.arrays import Datasets
from lightning_fedssl.data.sources.table import Table
from lightning_fedssl.export.model_card import model_card
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.models import CNN, MLP
from lightning_fedssl.round import Federation
from lightning_fedssl.state import ClientUpdate, ServerState
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.system import Availability, Faults
from lightning_fedssl.trainer.judge import Judge
from lightning_fedssl.updates import CentralDP, Median, Quarantine
from lightning_fedssl.updates.privacy import secret_normal
from tests.algorithms.helpers import METHODS, toy_fedmatch, toy_rgd, toy_semi_sfl, toy_shvr, uneven_clients
from tests.toy import (
    SPEC,
    ToyData,
    assert_same,
    evaluated,
    forked,
    images_of,
    labeled_clients,
    toy_fedavg,
    toy_semifl,
    toy_trainer,
)
from tests.toy import weights as weights_of
from tests.trainer.helpers import StopAfter, judged_by, logged


def private(**kwargs: Any) -> CentralDP:
    return CentralDP(**{"delta": 1e-3, "noise_multiplier": 1.0, "clip": 0.5} | kwargs)


def trainer_of(path: Path, privacy: CentralDP | None = None, **kwargs: Any) -> Any:
    return toy_trainer(path, **{"updates": [privacy or private()]} | kwargs)


def uniform(**kwargs: Any) -> FedAvg:
    return toy_fedavg(client_weighting="uniform", **kwargs)


# Clip and noise.


def test_an_update_is_clipped_over_all_its_tensors_together() -> None:
    model = {"w": torch.tensor([1.0, 1.0]), "v": torch.tensor([0.0])}
    update = ClientUpdate(0, {"w": torch.tensor([4.0, 1.0])}, {"v": torch.tensor([4.0])}, 1, 1)
    moved, norm = private(clip=2.5).clipped(update, model)
    assert norm == 5
    assert (moved["w"].tolist(), moved["v"].tolist()) == ([1.5, 0], [2])
    assert private(clip=5.1).clipped(update, model)[0]["w"].tolist() == [3, 0]
    sent = private(clip=2.5).at_node(update, model)
    assert (sent.parameters["w"].tolist(), sent.buffers["v"].tolist()) == ([2.5, 1], [2])


def test_the_norm_of_a_large_tensor_is_not_too_small() -> None:
    sent = {"w": torch.full((1_000_000,), 0.1)}
    moved, _ = private(clip=2.0).clipped(ClientUpdate(0, sent, {}, 1, 1), {"w": torch.zeros(1_000_000)})
    assert float(moved["w"].double().norm()) == pytest.approx(2.0, rel=1e-6)


class Away(Availability):
    """Some clients are never there, by default all, so that the model moves by noise alone."""

    def __init__(self, *clients: int) -> None:
        self.clients = clients or range(1000)

    def dropout_probability(self, seed: int, round_index: int, client: int) -> float:
        return float(client in self.clients)


class Start(FederatedCallback):
    """The model before the first round."""

    model: State | None = None

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        self.model = self.model or weights_of(algorithm)


def noise_of(path: Path, privacy: CentralDP) -> State:
    """How two rounds in which nobody trains change weights and buffers."""
    algorithm, start = uniform(network=partial(CNN, width=16, norm="batch")), Start()
    trainer = trainer_of(path, privacy, max_rounds=2, callbacks=start, faults=Faults(Away()))
    trainer.fit(algorithm, labeled_clients())
    assert start.model is not None
    assert all(float(t.min()) >= 0 for name, t in weights_of(algorithm).items() if name.endswith("running_var"))
    return {name: t - start.model[name] for name, t in weights_of(algorithm).items() if t.is_floating_point()}


def test_the_noise_on_the_mean_has_the_stated_deviation_in_every_tensor(tmp_path: Path) -> None:
    expected = 3.0 * 0.5 / 3 * math.sqrt(2)  # z C / m, two rounds
    noise = {n: t for n, t in noise_of(tmp_path, private(noise_multiplier=3.0)).items() if "running_var" not in n}
    assert float(torch.cat([t.flatten() for t in noise.values()]).std()) == pytest.approx(expected, rel=0.03)
    for name, t in noise.items():
        if t.numel() > 15:
            assert float(t.std()) == pytest.approx(expected, rel=3 / t.numel() ** 0.5), name


def test_a_population_changes_the_noise_on_the_mean_to_that_of_its_cohort(tmp_path: Path) -> None:
    name = "network.classifier.weight"
    own = noise_of(tmp_path / "own", private())[name]
    simulated = noise_of(tmp_path / "all", private(delta=1e-6, population=10_000, population_cohort=30))[name]
    torch.testing.assert_close(simulated * 10, own, rtol=1e-3, atol=1e-5)  # 30 clients instead of 3


def test_neighbouring_federations_differ_by_at_most_the_clip(tmp_path: Path) -> None:
    models = list[State]()
    for faults in (None, Faults(Away(0))):
        algorithm = uniform(network=partial(CNN, width=4, norm="batch"), client_epochs=5)
        privacy = private(noise_multiplier=0)
        trainer = trainer_of(tmp_path / str(len(models)), privacy, max_rounds=1, clients_per_round=4, faults=faults)
        trainer.fit(algorithm, labeled_clients())
        models.append(weights_of(algorithm))
    difference = [4 * (models[1][n] - t) for n, t in models[0].items() if t.is_floating_point()]
    distance = float(torch.cat([t.flatten() for t in difference]).norm())
    assert 0.4 < distance <= 0.5 * (1 + 1e-5)  # the client that is left out was clipped


def test_numbers_of_images_and_steps_change_nothing_that_is_published(tmp_path: Path) -> None:
    class Scrambled(Judge):
        def judged(self, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
            for number, update in enumerate(super().judged(updates)):
                yield replace(update, num_samples=10**number, num_steps=number + 1)

    published = []
    for judge in (Judge, Scrambled):
        algorithm, trainer = toy_semifl(), trainer_of(tmp_path / judge.__name__)
        trainer.fit(algorithm, ToyData(), federation=judged_by(judge))
        result = json.loads(Path(trainer.log_dir, "result.json").read_text())
        scalars = {k: v for k, v in result["metrics"].items() if not k.startswith(("client/", "time/"))}
        published.append((weights_of(algorithm), scalars, result["privacy"]))
    assert_same(published[0][0], published[1][0])
    assert published[0][1:] == published[1][1:]


# Attacks on it.


def one_round(privacy: CentralDP, canary: bool, seed: int) -> float:
    """How far a round of 4 clients moves a linear model in the direction of the canary, an update of one of them."""
    start = {"w": torch.zeros(20), "v": torch.zeros(20)}
    linear = nn.Module()
    linear.w = nn.Parameter(start["w"])
    linear.register_buffer("v", start["v"])
    vars(linear).update(
        server=ServerState({"w": start["w"]}, {"v": start["v"]}), uploaded_weights=lambda: ["w"],
        uploaded_buffers=lambda: ["v"], upload_sizes=ClientUpdate.sizes, origin={},
    )  # fmt: skip
    trainer: Any = SimpleNamespace(
        algorithm=linear, seed=seed, round_index=1, cohort_size=4, max_rounds=1, ckpt_path=None, should_stop=False,
        datamodule=SimpleNamespace(num_clients=4), log=lambda *_: None,
    )  # fmt: skip
    privacy.reset()
    privacy.on_fit_start(trainer, trainer.algorithm)
    rng = torch.Generator().manual_seed(seed)
    direction = torch.full((20,), 20**-0.5)
    clients = [(0.1 * torch.randn(20, generator=rng), 0.1 * torch.randn(20, generator=rng), 1) for _ in range(3)]
    clients += [(0.0 * direction, 3.0 * direction, 10)] if canary else []
    updates = [ClientUpdate(k, {"w": w}, {"v": v}, n, 1) for k, (w, v, n) in enumerate(clients)]
    (mean,) = privacy.combine(trainer, trainer.algorithm, iter(updates))
    return float(mean.buffers["v"] @ direction)


def audited(privacy: CentralDP, delta: float = 1e-3, runs: int = 400) -> float:
    """A lower bound of epsilon with 99 % confidence, at most 20: that of Gaussian noise of the measured deviation.

    An attacker who knows the direction of the canary decides by the likelihood ratio, which grows with the movement in
    that direction. It sees nothing of noise that is not Gaussian. Counting errors would need 1,500 runs to see that a
    noise was halved, and 100,000 for 8 rounds.
    """
    without, canary = np.array([[one_round(privacy, k, 2 * i + k) for i in range(runs)] for k in (False, True)])
    mu = (canary.mean() - without.mean()) / math.sqrt((canary.var() + without.var()) / 2)
    mu -= norm.ppf(0.99) * math.sqrt(2 / runs + mu**2 / (4 * runs))
    e = np.arange(0, 20, 0.01)
    return 0.01 * int((norm.cdf(mu / 2 - e / mu) - np.exp(e) * norm.cdf(-mu / 2 - e / mu) > delta).sum())


class NoNoiseOnBuffers(CentralDP):
    def _noisy_mean(self, model: State, total: State, scale: float, trainer: Any) -> State:
        return super()._noisy_mean(model, total, scale, trainer) | {"v": model["v"] + total["v"] / trainer.cohort_size}


class HalvedNoise(CentralDP):
    def _noisy_mean(self, model: State, total: State, scale: float, trainer: Any) -> State:
        return super()._noisy_mean(model, total, scale / 2, trainer)


class WeightedBySamples(CentralDP):
    def clipped(self, update: ClientUpdate, model: State) -> tuple[State, float]:
        moved, norm = super().clipped(update, model)
        return {name: update.num_samples * t for name, t in moved.items()}, norm


def test_a_canary_finds_no_more_than_epsilon_and_finds_broken_variants() -> None:
    given: dict[str, Any] = {"delta": 1e-3, "noise_multiplier": 2.0, "clip": 1.0}
    sound = CentralDP(**given)
    bound = audited(sound)
    epsilon = sound.describe()["epsilon"]  # type: ignore[index]
    assert 0 < bound <= epsilon < 2
    for broken in (HalvedNoise, NoNoiseOnBuffers, WeightedBySamples):
        assert audited(broken(**given)) > epsilon, broken.__name__


class Memorised(ToyData):
    """Images with random labels, which can only be learned by heart."""

    def _load(self) -> tuple[DatasetSpec, ImageSplit, ImageSplit]:
        labels = torch.from_numpy(np.random.default_rng(1).integers(0, 3, 240))
        images = images_of(torch.from_numpy(np.random.default_rng(2).integers(0, 3, 240)), 0)
        return SPEC, ImageSplit(images[:120], labels[:120]), ImageSplit(images[120:], labels[120:])


def leak(path: Path, noise: float | None) -> float:
    """The AUC by which the loss of an image tells whether a client has trained on it."""
    algorithm = uniform(network=partial(MLP, hidden=(64,)), client_epochs=8, optimizer=partial(torch.optim.SGD, lr=0.3))
    data = Memorised(num_labels="all", label_location="clients", validation=0, weak="none", client_batch_size=15)
    keys = {"max_rounds": 5, "clients_per_round": 4, "logger": False, "check_val_every_n_rounds": 5}
    privacy = None if noise is None else private(noise_multiplier=noise, clip=3.0)
    toy_trainer(path, updates=[privacy] if privacy else [], **keys).fit(algorithm, data)
    algorithm.eval()
    algorithm.load_state_dict(algorithm.server.model(), strict=False)
    plain = data.local_data(0, 1).plain

    def losses(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return nn.functional.cross_entropy(algorithm(x), y, reduction="none")

    used = torch.arange(120)
    members, others = losses(plain(used), data.true_labels(used)), losses(*evaluated(data, used))
    return float((members[:, None] < others[None]).double().mean())


@pytest.mark.slow
def test_membership_inference_falls_with_the_noise(tmp_path: Path) -> None:
    none, weak, strong = leak(tmp_path / "a", None), leak(tmp_path / "b", 0.01), leak(tmp_path / "c", 1.0)
    assert none > 0.75
    assert weak > strong + 0.1
    assert strong == pytest.approx(0.5, abs=0.1)


def test_the_noise_of_a_deployment_is_normal_and_no_function_of_the_seed() -> None:
    a, b = secret_normal(100_000), secret_normal(100_000)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.02
    for moment, expected in ((a.mean(), 0), (a.std(), 1), ((a**3).mean(), 0), ((a**4).mean(), 3)):
        assert moment == pytest.approx(expected, abs=0.12)
    privacy = private()
    trainer: Any = SimpleNamespace(seed=0, cohort_size=10, datamodule=SimpleNamespace(num_clients=30))
    drawn = [privacy.draw_cohort(trainer, 1) for _ in range(2)]
    assert drawn[0] == drawn[1]
    privacy.on_deployment(1)
    assert len({tuple(privacy.draw_cohort(trainer, 1)) for _ in range(5)}) > 1


# Sampling, budget, checkpoints and ranks.


def test_poisson_cohorts_vary_in_size_and_every_client_comes_as_often() -> None:
    trainer: Any = SimpleNamespace(seed=3, cohort_size=5, datamodule=SimpleNamespace(num_clients=20))
    cohorts = []
    for index in range(1, 401):
        cohorts.append(private().draw_cohort(trainer, index))
    sizes = [len(cohort) for cohort in cohorts]
    assert np.mean(sizes) == pytest.approx(5, abs=0.3)
    assert np.var(sizes) == pytest.approx(20 * 0.25 * 0.75, rel=0.25)
    counts = np.bincount([client for cohort in cohorts for client in cohort], minlength=20)
    assert counts.min() > 70


def test_a_round_without_clients_adds_noise_like_any_other(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, clients_per_round=1, max_rounds=6)
    trainer.fit(uniform(), labeled_clients(num_clients=8))
    rows = logged(trainer)
    assert len({row["privacy/epsilon"] for row in rows.values()}) == 6
    assert any("privacy/clipped_share" not in row for row in rows.values())


def test_a_run_ends_when_its_budget_is_spent_and_stays_ended(tmp_path: Path) -> None:
    calibrated = trainer_of(tmp_path / "c", CentralDP(delta=1e-3, epsilon=3.0, clip=0.5), max_rounds=3)
    calibrated.fit(uniform(), labeled_clients())
    assert 2.9 < float(calibrated.callback_metrics["privacy/epsilon"]) <= 3.0
    for ckpt_path in (None, "last"):
        privacy = private(noise_multiplier=2.0, epsilon=2.5)
        trainer = trainer_of(tmp_path / "n", privacy, max_rounds=9, allow_changed=False)
        trainer.fit(uniform(), labeled_clients(), ckpt_path=ckpt_path)
        spent = privacy.describe()
        assert spent is not None
        assert spent["epsilon"] <= 2.5
        assert 1 <= trainer.round_index == spent["rounds"] < 9
    with pytest.raises(ValueError, match=r"one round with noise_multiplier 0.1 spends"):
        trainer_of(tmp_path / "x", private(noise_multiplier=0.1, epsilon=1.0)).fit(uniform(), labeled_clients())


def test_a_longer_run_keeps_the_noise_of_its_checkpoint(tmp_path: Path) -> None:
    """With epsilon given, the noise for more rounds would be another: the rounds before had less."""
    for rounds, path in ((2, None), (5, "last")):
        privacy = CentralDP(delta=1e-3, epsilon=3.0, clip=0.5)
        trainer = trainer_of(tmp_path, privacy, max_rounds=rounds)
        trainer.fit(uniform(), labeled_clients(), ckpt_path=path)
        assert trainer.round_index == 2
        assert privacy.describe()["rounds"] == 2  # type: ignore[index]


def test_a_resumed_run_is_bitwise_that_of_one_without_interruption(tmp_path: Path) -> None:
    whole, parts = toy_semifl(), toy_semifl()
    trainer = trainer_of(tmp_path / "whole", max_rounds=4)
    trainer.fit(whole, ToyData())
    trainer_of(tmp_path / "parts", max_rounds=4, callbacks=StopAfter(2)).fit(toy_semifl(), ToyData())
    resumed = trainer_of(tmp_path / "parts", max_rounds=4)
    resumed.fit(parts, ToyData(), ckpt_path="last")
    assert_same(weights_of(whole), weights_of(parts))
    assert resumed.describe_privacy() == trainer.describe_privacy()


def test_a_checkpoint_cannot_be_resumed_as_if_its_rounds_had_been_private_or_were_not(tmp_path: Path) -> None:
    trainer_of(tmp_path / "private", max_rounds=1).fit(uniform(), labeled_clients())
    toy_trainer(tmp_path / "plain", max_rounds=1, updates=[]).fit(uniform(), labeled_clients())
    data = labeled_clients()
    with pytest.raises(ValueError, match=r"without CentralDP"):
        trainer_of(tmp_path / "plain", allow_changed=True).fit(uniform(), data, ckpt_path="last")
    with pytest.raises(ValueError, match=r"trainer.updates \('CentralDP',\) \(now \(\)\)"):
        toy_trainer(tmp_path / "private", updates=[]).fit(uniform(), data, ckpt_path="last")
    trainer = trainer_of(tmp_path / "private", private(population=100), allow_changed=True)
    with pytest.raises(ValueError, match="another sampling or population"):
        trainer.fit(uniform(), data, ckpt_path="last")
    content = checkpoint_file.load(checkpoint_file.find("last", tmp_path / "private"))
    for rounds in (math.nan, -(2**70)):
        content["callbacks"]["CentralDP"]["rounds"] = rounds
        checkpoint_file.save(content, tmp_path / "odd.ckpt")
        with pytest.raises(ValueError, match=r"CentralDP\.rounds is (nan|-1180)"):
            trainer_of(tmp_path / "odd").fit(uniform(), data, ckpt_path=tmp_path / "odd.ckpt")
    trained = uniform()
    toy_trainer(tmp_path / "before", max_rounds=1, updates=[]).fit(trained, labeled_clients())
    with pytest.raises(ValueError, match="an earlier fit has trained this model"):
        trainer_of(tmp_path / "after").fit(trained, labeled_clients())


@pytest.mark.parametrize("method", ["semifl", "fixmatch"])
def test_two_ranks_are_bitwise_one(method: str, tmp_path: Path) -> None:
    models = []
    for ranks in (1, 2):
        algorithm = METHODS[method][0]()
        algorithm.client_weighting = "uniform"
        trainer_of(tmp_path / str(ranks), clients_per_round=4, **forked(ranks)).fit(algorithm, ToyData())
        models.append(weights_of(algorithm))
    assert_same(*models)


def test_result_checkpoint_and_model_card_say_what_epsilon_means(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, private(delta=1e-6, population=100_000, population_cohort=1000), max_rounds=1)
    trainer.fit(uniform(), labeled_clients())
    result = json.loads(Path(trainer.log_dir, "result.json").read_text())["privacy"]
    assert (result["unit"], result["delta"], result["population"], result["clip"]) == ("client", 1e-6, 100_000, 0.5)
    saved = checkpoint_file.load(Path(trainer.log_dir, "checkpoints", "last.ckpt"))
    assert saved["model"]["privacy"] == result
    card = model_card(saved["model"])
    assert all(part in card for part in ("100,000 clients", "simulated", "epsilon"))
    assert float(trainer.callback_metrics["privacy/population"]) == 100_000


# What is refused, and what works.


@pytest.mark.parametrize(
    ("make", "data", "keys", "named"),
    [
        (toy_semi_sfl, ToyData, {}, "SemiSFL exchanges features"),
        (toy_fedmatch, ToyData, {}, "FedMatch sums"),
        (toy_rgd, ToyData, {}, "FedRGD sums"),
        (toy_shvr, uneven_clients, {}, "FedSHVR sums"),
        (lambda: toy_semifl(client_weighting="samples"), ToyData, {}, "model.client_weighting"),
        (toy_semifl, ToyData, {"updates": [Quarantine(), private()]}, "Quarantine compares updates"),
        (toy_semifl, ToyData, {"updates": [Median(), private()]}, "both combine"),
        (toy_semifl, ToyData, {"precision": "bf16-true"}, "trainer.precision: .*16 bits"),
        (toy_semifl, ToyData, {"updates": [private(delta=0.3)]}, "delta is 0.3: give less than 1 / clients"),
        (toy_semifl, ToyData, {"updates": [private(noise_multiplier=1e-4)]}, "noise_multiplier is 0.0001: too small"),
        (toy_semifl, ToyData, {"callbacks": [StaticBatchNorm(source="moments")]}, "StaticBatchNorm: source moments"),
        (
            toy_semifl,
            ToyData,
            {"callbacks": [FederatedCheckpoint(monitor="pseudo_label/accuracy")]},
            "FederatedCheckpoint: monitor pseudo_label/accuracy",
        ),
    ],
)
def test_what_the_analysis_does_not_cover_is_refused_by_name(
    make: Any, data: Any, keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=named):
        trainer_of(tmp_path, **keys).fit(make(), data())


def rows_of_clients(**kwargs: Any) -> FederatedDataModule:
    """Rows of four clients, each with labels; the first client's are shifted."""
    rows, shift = torch.randn(80, 4, generator=torch.Generator().manual_seed(0)), kwargs.pop("shift", 0.0)
    labels, clients = torch.arange(80) % 2, torch.arange(80) % 4
    train = TensorDataset(rows + shift * (clients == 0)[:, None], labels)
    source = Datasets(train, TensorDataset(rows, labels), client_ids=clients.tolist())
    given = {"num_clients": 4, "num_labels": "all", "label_location": "clients", "partition": NaturalClients()}
    return FederatedDataModule(source, **{**given, "validation": 0, "weak": "none", "strong": "none", **kwargs})


def table_of(tmp_path: Path, head: str, row: str) -> FederatedDataModule:
    file = tmp_path / "rows.csv"
    file.write_text("\n".join([f"{head},label", *(f"{row},{k % 2}" for k in range(59)), ",0"]))
    given: dict[str, Any] = {"num_labels": "all", "weak": "none", "strong": "none", "normalize": False}
    return FederatedDataModule(Table(str(file)), num_clients=4, label_location="clients", **given)


@pytest.mark.parametrize(
    ("make_data", "named"),
    [
        (lambda path: rows_of_clients(), "data.normalize: .*public {mean"),
        (lambda path: rows_of_clients(backbone=nn.Identity()), "data.normalize: .*or false"),
        (lambda path: table_of(path, "age", "30"), "categories of age"),
        (lambda path: table_of(path, "town", "Rome"), "categories of town"),
    ],
)
def test_constants_of_clients_samples_are_refused(make_data: Any, named: str, tmp_path: Path) -> None:
    trainer, data = trainer_of(tmp_path, clients_per_round=2), make_data(tmp_path)
    with pytest.raises(ValueError, match=named):
        trainer.fit(FedAvg(network=MLP, client_weighting="uniform"), data)


def test_the_description_of_a_private_model_is_no_function_of_the_samples(tmp_path: Path) -> None:
    """Of two federations that differ in one client, but for what the noisy model answers."""
    found = []
    for shift in (0.0, 5.0):
        folder = tmp_path / str(shift)
        trainer = trainer_of(folder, clients_per_round=2, max_rounds=1)
        algorithm = FedAvg(network=MLP, client_weighting="uniform")
        public = {"mean": [0.0] * 4, "std": [1.0] * 4}
        trainer.fit(algorithm, rows_of_clients(shift=shift, normalize=public))
        trainer.save_model(folder)
        found.append(json.loads((folder / "model.json").read_text()))
        del found[-1]["metrics"]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["semifl", "fedavg_momentum", "fixmatch", "uda", "pseudo_label", "mean_teacher"])
def test_methods_that_average_train_with_privacy(name: str, tmp_path: Path) -> None:
    make, data = METHODS[name]
    algorithm = make()
    algorithm.client_weighting = "uniform"
    trainer = trainer_of(tmp_path, private(clip=0.05, noise_multiplier=0.1))
    trainer.fit(algorithm, data())
    assert float(trainer.callback_metrics["privacy/epsilon"]) > 0


def test_an_upload_beside_the_model_is_refused(tmp_path: Path) -> None:
    class Chatty(FedAvg):
        def upload_sizes(self, update: ClientUpdate) -> dict[str, int]:
            return super().upload_sizes(update) | {"class histogram": 24}

    algorithm = Chatty(network=partial(CNN, width=4, norm="group"), client_weighting="uniform")
    with pytest.raises(ValueError, match="uploads class histogram in addition to the model"):
        trainer_of(tmp_path).fit(algorithm, labeled_clients())


def test_a_second_phase_of_clients_in_a_round_is_refused(tmp_path: Path) -> None:
    class Twice(FedAvg):
        def round(self, federation: Federation) -> None:
            super().round(federation)
            super().round(federation)

    algorithm = Twice(network=partial(CNN, width=4, norm="group"), client_weighting="uniform")
    with pytest.raises(ValueError, match="trains its clients twice"):
        trainer_of(tmp_path).fit(algorithm, labeled_clients())


@pytest.mark.parametrize(
    "wrong",
    [
        {"delta": 0},
        {"clip": 0},
        {"noise_multiplier": -1},
        {"noise_multiplier": None},
        {"population_cohort": 3},
        {"epsilon": 0},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"CentralDP\.\w+ is "):
        private(**wrong)
