"""LightningModules as the models of a federation: the page's modules, training by hand, ranks, resuming, refusals."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_fedssl import UDA, FedAvg, FixMatch, LabelFlip, sampling
from lightning_fedssl.algorithms.from_lightning import samples_of
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import ClientEvaluation
from lightning_fedssl.data import FederatedDataModule
from lightning_fedssl.functional.averaging import WeightedSum
from lightning_fedssl.functional.losses import consistency_loss
from lightning_fedssl.functional.pseudo_labels import pseudo_label
from lightning_fedssl.schedules import Cosine
from tests.toy import ToyData, assert_same, forked, toy_trainer
from tests.trainer.helpers import StopAfter, logged

PAGE = (Path(__file__).parents[2] / "docs" / "lightning_module.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'```python title="([\w.]+)"\n(.*?)```', PAGE, re.DOTALL))


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's files in a folder that modules are imported from."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def module_of(name: str) -> ModuleType:
    return importlib.import_module(name)


class Line(LightningModule):
    """A regression on named inputs; it records the hooks that Lightning calls."""

    def __init__(self, lr: float = 0.05, frozen_dropout: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        if frozen_dropout:
            self.net[1].eval()
        self.lr = lr
        self.called: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch["x"]), batch["y"])
        self.log("train_mse", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_mse", F.mse_loss(self(batch["x"]), batch["y"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def on_train_start(self) -> None:
        self.called.append("start")

    def on_train_epoch_start(self) -> None:
        self.called.append("epoch")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.called.append(f"batch {batch_idx}")

    def on_train_epoch_end(self) -> None:
        self.called.append("end of epoch")

    def on_train_end(self) -> None:
        self.called.append("end")


class Manual(Line):
    """A module with optimization of its own."""

    automatic_optimization = False


class Noisy(Dataset[dict[str, Tensor]]):
    """Samples with NumPy's random numbers in them, as a user's own augmentation has."""

    def __init__(self, seed: int, count: int = 10) -> None:
        self.x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = self.x[index]
        return {"x": x + float(np.random.rand()) / 10, "y": x.sum(0, keepdim=True)}


def loaders(count: int = 3, **kwargs: Any) -> list[DataLoader[Any]]:
    return [DataLoader(Noisy(k, 6 + 2 * k), **{"batch_size": 4, "shuffle": True, **kwargs}) for k in range(count)]


def plain(count: int = 3) -> list[DataLoader[Any]]:
    """Loaders whose batches are the same at every pass."""
    rows = [[{"x": x, "y": x.sum(0, keepdim=True)} for x in Noisy(k, 6 + 2 * k).x] for k in range(count)]
    return [DataLoader(part, batch_size=4) for part in rows]  # type: ignore[arg-type]


def fit(folder: Path, federation: Any, ranks: int = 1, **kwargs: Any) -> tuple[dict[str, Tensor], Any]:
    """The global weights and the trainer of a run of two rounds."""
    arguments: dict[str, Any] = {"max_rounds": 2, "clients_per_round": 3, **forked(ranks), **kwargs}
    ckpt_path = arguments.pop("ckpt_path", None)
    model, data = federation
    trainer = toy_trainer(folder, **arguments)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return {name: t.clone() for name, t in model.server.model().items()}, trainer


def mean_of(results: list[dict[str, Tensor]], counts: list[int]) -> dict[str, Tensor]:
    """The weighted mean, with the server's rounding."""
    total = WeightedSum()
    for result, count in zip(results, counts, strict=True):
        total.add(result, count)
    mean = total.mean()
    assert mean is not None
    return mean


def by_hand(module: Line, clients: list[DataLoader[Any]], order: list[int], epochs: int, round_index: int) -> None:
    """One round of federated averaging without Lightning's Trainer and without this package's loop."""
    sent, results = {n: t.clone() for n, t in module.state_dict().items()}, []
    for client in order:
        module.load_state_dict(sent)
        module.train()
        torch.manual_seed(sampling.derive_key(sampling.global_seed(), "network", round_index, client))
        optimizer = module.configure_optimizers()
        for _ in range(epochs):
            for batch in clients[client]:
                optimizer.zero_grad()
                F.mse_loss(module(batch["x"]), batch["y"]).backward()
                optimizer.step()
        results.append({n: t.clone() for n, t in module.state_dict().items()})
    module.load_state_dict(mean_of(results, [len(clients[k].dataset) for k in order]))  # type: ignore[arg-type]


def test_a_run_is_the_training_written_by_hand(tmp_path: Path) -> None:
    lightning.seed_everything(3, verbose=False)
    clients, ours, own = plain(), Line(), Line()
    ours.net[1] = own.net[1] = nn.Identity()  # the Trainer draws a random number before the first step
    found, _ = fit(tmp_path, FedAvg.from_lightning(ours, clients, client_epochs=2))
    for round_index in (1, 2):
        by_hand(own, clients, sampling.cohort(3, round_index, 3, 3), 2, round_index)
    assert_same(found, {f"network.{n}": t for n, t in own.state_dict().items()})
    assert_same(dict(ours.state_dict()), dict(own.state_dict()))


class Steps(FederatedCallback):
    """Records the numbers of the clients' steps."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_client_batch_end(self, trainer: Any, algorithm: Any, step: int) -> None:
        self.seen.append(step)


def test_hooks_are_called_as_by_lightning(tmp_path: Path) -> None:
    module, alone, steps = Line(), Line(), Steps()
    federation = FedAvg.from_lightning(module, plain(1), client_epochs=2)
    fit(tmp_path, federation, max_rounds=1, clients_per_round=1, callbacks=[steps])
    assert steps.seen == [0, 1, 2, 3]
    Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", default_root_dir=tmp_path, limit_val_batches=0,
    ).fit(alone, plain(1)[0])  # fmt: skip
    assert module.called == alone.called
    assert module.called.count("epoch") == 2


def test_two_ranks_are_one_and_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    def make() -> Any:
        lightning.seed_everything(3, verbose=False)
        return FedAvg.from_lightning(Line(), loaders(5), client_epochs=2, val_dataloaders=plain(1))

    whole, trainer = fit(tmp_path / "1", make(), max_rounds=4)
    two, of_two = fit(tmp_path / "2", make(), ranks=2, max_rounds=4)
    assert_same(whole, two)
    assert logged(trainer) == logged(of_two)
    _, stopped = fit(tmp_path / "3", make(), max_rounds=4, callbacks=[StopAfter(2)])
    last = Path(stopped.log_dir) / "checkpoints" / "last.ckpt"
    resumed, _ = fit(tmp_path / "4", make(), max_rounds=4, ckpt_path=last)
    assert_same(whole, resumed)


def test_scalars_are_means_over_the_clients_samples(tmp_path: Path) -> None:
    module = Line(lr=0.0)
    module.net[1] = nn.Identity()
    clients = plain()
    _, trainer = fit(tmp_path, FedAvg.from_lightning(module, clients, val_dataloaders=clients[0]), max_rounds=1)
    with torch.no_grad():
        losses = [[F.mse_loss(module(b["x"]), b["y"]) for b in loader] for loader in clients]
        of_samples = [torch.cat([(module(b["x"]) - b["y"]) ** 2 for b in loader]).mean() for loader in clients]
    counts = [len(loader.dataset) for loader in clients]  # type: ignore[arg-type]
    expected = {
        "client/loss": sum(n * float(torch.stack(part).mean()) for n, part in zip(counts, losses, strict=True)) / 24,
        "train_mse": sum(n * float(mean) for n, mean in zip(counts, of_samples, strict=True)) / 24,
        "val_mse": float(of_samples[0]),
    }
    for name, value in expected.items():
        assert float(trainer.callback_metrics[name]) == pytest.approx(value, rel=1e-5), name
    assert "train_mse" in logged(trainer)[1]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(7, 1))


class SizedStream(Stream):
    def __len__(self) -> int:
        return 7


@pytest.mark.parametrize(
    ("make", "drawn"),
    [
        (partial(DataLoader, batch_size=32), 100),
        (partial(DataLoader, batch_size=32, drop_last=True), 96),
        (partial(DataLoader, batch_size=32, sampler=SubsetRandomSampler(range(13))), 13),
        (partial(DataLoader, sampler=RandomSampler(range(100), replacement=True, num_samples=35)), 35),
        (partial(DataLoader, batch_sampler=BatchSampler(SubsetRandomSampler(range(9)), 4, drop_last=False)), 9),
        (partial(DataLoader, batch_sampler=BatchSampler(SubsetRandomSampler(range(9)), 4, drop_last=True)), 8),
        (partial(DataLoader, batch_sampler=[[1, 2], [3]]), 3),
        (partial(DataLoader, batch_size=None, sampler=SubsetRandomSampler(range(4))), 4),
        (lambda data: DataLoader(SizedStream(), batch_size=3), 7),
        (lambda data: DataLoader(SizedStream(), batch_size=3, drop_last=True), 6),
    ],
)
def test_a_client_weighs_what_its_epoch_draws(make: Any, drawn: int) -> None:
    loader = make(TensorDataset(torch.randn(100, 1)))
    assert samples_of(loader, "") == drawn


def test_a_run_speaks_of_the_module_and_not_of_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Named(Line):
        def __init__(self, lr: float) -> None:
            super().__init__(lr)
            self.save_hyperparameters()

    federation = FedAvg.from_lightning(Named(lr=0.25), plain(), val_dataloaders=plain()[0])
    _, trainer = fit(tmp_path, federation, enable_progress_bar=True)
    written = capsys.readouterr().out
    assert f"val_mse {float(trainer.callback_metrics['val_mse']):.4g}" in written
    assert "class" not in written
    assert "labelled" not in written
    trainer.save_model(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text()) == {"lr": 0.25}
    description = json.loads((tmp_path / "saved" / "model.json").read_text())
    assert description["class_names"] == []
    assert "val_mse" in description["metrics"]
    assert "1602.05629" in description["citation"]


def test_lightning_does_not_comment_on_the_loaders_of_every_fit(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """It recommends more workers, and validation without shuffling."""
    fit(tmp_path, FedAvg.from_lightning(Line(), plain(), val_dataloaders=loaders(1)[0]), max_rounds=1)
    assert not [found for found in recwarn if "dataloader" in str(found.message)]


def test_fedprox_adds_the_gradient_of_its_term(tmp_path: Path) -> None:
    mu, client = 0.5, plain(1)
    module, own = Line(), Line()
    module.net[1] = own.net[1] = nn.Identity()
    federation = FedAvg.from_lightning(module, client, prox_mu=mu)
    found, _ = fit(tmp_path, federation, max_rounds=1, clients_per_round=1)
    sent = [w.detach().clone() for w in own.parameters()]
    optimizer = own.configure_optimizers()
    for batch in client[0]:
        optimizer.zero_grad()
        F.mse_loss(own(batch["x"]), batch["y"]).backward()
        for w, start in zip(own.parameters(), sent, strict=True):
            w.grad += mu * (w.detach() - start)  # type: ignore[operator]
        optimizer.step()
    for name, t in own.state_dict().items():
        torch.testing.assert_close(found[f"network.{name}"], t)
    plain_run, _ = fit(tmp_path / "0", FedAvg.from_lightning(Line(), client), max_rounds=1, clients_per_round=1)
    assert any(not torch.equal(t, plain_run[name]) for name, t in found.items() if name in plain_run)


class Classifier(LightningModule):
    """Two classes; it counts the labelled batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)
        self.labeled = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.labeled += 1
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_fixmatch_trains_clients_on_views_and_the_server_on_labels(tmp_path: Path) -> None:
    x, y = torch.randn(8, 2), torch.arange(8) % 2
    views = [DataLoader(TensorDataset(x * 4 + k, x * 4 - k), batch_size=4) for k in range(2)]
    server, module, own = DataLoader(TensorDataset(x, y), batch_size=4), Classifier(), Classifier()
    federation = FixMatch.from_lightning(module, views, server=server, threshold=0.6)
    found, trainer = fit(tmp_path, federation, max_rounds=1, clients_per_round=2)
    assert module.labeled == 2
    sent, results = {n: t.clone() for n, t in own.state_dict().items()}, []

    def steps(batches: Any, loss_of: Any) -> None:
        optimizer = own.configure_optimizers()
        for a, b in batches:
            optimizer.zero_grad()
            loss_of(a, b).backward()
            optimizer.step()

    for client in sampling.cohort(sampling.global_seed(), 1, 2, 2):
        own.load_state_dict(sent)
        steps(views[client], lambda a, b: consistency_loss(own(b), pseudo_label(own(a).detach(), 0.6)))
        results.append({n: t.clone() for n, t in own.state_dict().items()})
    own.load_state_dict(mean_of(results, [8, 8]))
    steps(server, lambda a, b: F.cross_entropy(own(a), b))
    for name, t in own.state_dict().items():
        torch.testing.assert_close(found[f"network.{name}"], t)
    assert 0 < float(trainer.callback_metrics["client/mask_rate"]) <= 1
    assert "server/loss" in trainer.callback_metrics


def test_data_of_class_labels_give_batches_of_samples_and_labels(tmp_path: Path) -> None:
    x, y = torch.randn(40, 2), torch.arange(40) % 2
    data = FederatedDataModule.from_datasets(
        (x, y), (x, y), weak="none", strong="none", num_clients=2, num_labels="all", label_location="clients",
        client_batch_size=6, validation=0,
    )  # fmt: skip
    module = Classifier()
    before = [w.clone() for w in module.parameters()]
    _, trainer = fit(tmp_path, FedAvg.from_lightning(module, data, client_epochs=2), clients_per_round=2, max_rounds=1)
    assert module.labeled == 2 * 2 * 4  # clients, epochs, batches of 20 samples
    assert not torch.equal(before[0], next(module.parameters()))
    assert float(trainer.callback_metrics["client/images"]) == 40


def test_data_of_class_labels_are_evaluated_in_batches_of_samples_and_labels(tmp_path: Path) -> None:
    x, y = torch.randn(40, 2), torch.arange(40) % 2
    data = FederatedDataModule.from_datasets(
        (x, y), (x, y), weak="none", strong="none", num_clients=2, num_labels="all",
        label_location="clients", client_batch_size=6, validation=0.25, eval_batch_size=8,
    )  # fmt: skip
    seen: dict[str, list[int]] = {"val": [], "test": []}

    class Watched(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            samples, labels = batch
            assert samples.shape == (len(labels), 2)
            seen["val"].append(len(labels))
            self.log("val_share", labels.double().mean(), batch_size=len(labels))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            seen["test"].append(len(batch[1]))

    _, trainer = fit(tmp_path, FedAvg.from_lightning(Watched(), data), clients_per_round=2, max_rounds=1)
    assert seen == {"val": [8, 2], "test": [8, 8, 8, 8, 8]}
    assert float(trainer.callback_metrics["val_share"]) == pytest.approx(0.5)


def test_client_evaluation_refuses_loaders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ClientEvaluation needs class labels.*leave it out"):
        fit(tmp_path, FedAvg.from_lightning(Line(), loaders()), callbacks=[ClientEvaluation()])


def test_a_schedule_multiplies_the_rates_of_the_module(tmp_path: Path) -> None:
    rates: list[float] = []

    class Watched(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]

    federation = FedAvg.from_lightning(Watched(), plain(1), schedule=Cosine())
    fit(tmp_path, federation, clients_per_round=1)
    factors = [Cosine().factor(round_index, 2) for round_index in (1, 1, 2, 2)]
    assert rates == pytest.approx([0.05 * factor for factor in factors])
    assert len(set(factors)) == 2


def test_layers_in_evaluation_mode_stay_in_it(tmp_path: Path) -> None:
    seen: list[list[bool]] = []

    class Watched(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append([layer.training for layer in self.net])

    module = Watched(frozen_dropout=True)
    fit(tmp_path, FedAvg.from_lightning(module, plain(1), val_dataloaders=plain(1)), clients_per_round=1)
    assert seen == [[True, False, True]] * 4
    assert "training_step" not in vars(module)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UDA.from_lightning(Line(), loaders()), "only FedAvg and FixMatch"),
        (lambda: FedAvg.from_lightning(Line(), loaders(), lr=0.1), r"FedAvg\.from_lightning: .* argument 'lr'; "),
        (lambda: FedAvg.from_lightning(Line(), loaders(), client_epochs="two"), "from_lightning: .*'int' and 'str'"),
        (lambda: FedAvg.from_lightning(nn.Linear(1, 1), loaders()), "no LightningModule"),  # type: ignore[arg-type]
        (lambda: FedAvg.from_lightning(Line(), loaders(), freeze=["net"]), "freeze is what the module itself decides"),
        (lambda: FedAvg.from_lightning(Line, loaders()), "the class Line"),  # type: ignore[arg-type]
        (lambda: FedAvg.from_lightning(Line(), []), "clients is empty"),
        (lambda: FedAvg.from_lightning(Line(), plain(1)[0]), "clients is one DataLoader"),  # type: ignore[arg-type]
        (
            lambda: FedAvg.from_lightning(Line(), [DataLoader(Stream())]),
            r"clients\[0\] reads an IterableDataset.*__len__",
        ),
        (lambda: FedAvg.from_lightning(Line(), [iter([1])]), r"clients\[0\] is a list_iterator"),  # type: ignore[list-item]
        (
            lambda: FedAvg.from_lightning(Line(), loaders(drop_last=True, batch_size=50)),
            "DataLoader without",
        ),
        (lambda: FedAvg.from_lightning(Line(), loaders(), client_epochs=0.5), "whole numbers of epochs"),
        (lambda: FixMatch.from_lightning(Line(), loaders()), "server=loader"),
        (lambda: FedAvg.from_lightning(Manual(), loaders(), prox_mu=0.1), "prox_mu is added"),
        (lambda: FedAvg.from_lightning(Line(), loaders(), server=loaders()[0]), "give no server"),
        (lambda: FedAvg.from_lightning(Line(), ToyData(), val_dataloaders=loaders()), "val_dataloaders is for loaders"),
        (lambda: FedAvg.from_lightning(Line(), ToyData(), test_dataloaders=loaders()), "test_dataloaders .* leave it"),
    ],
)
def test_what_cannot_be_trained_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_an_attack_on_stored_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.attack: LabelFlip"):
        fit(tmp_path, FedAvg.from_lightning(Line(), plain()), attack=LabelFlip(0.5))


def test_a_schedule_beside_schedulers_is_refused(page: Path) -> None:
    images = DataLoader(TensorDataset(torch.rand(8, 1, 4, 4), torch.ones(8, 1, 4, 4)), batch_size=4)
    federation = FedAvg.from_lightning(module_of("segmentation").Segmentation(), [images], schedule=Cosine())
    with pytest.raises(ValueError, match="schedulers of configure_optimizers"):
        fit(page, federation, clients_per_round=1)


def test_the_page_runs_and_its_modules_learn(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    lightning.seed_everything(1, verbose=False)
    for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(text.replace("max_rounds=2", "max_rounds=6"), "lightning_module.md", "exec"), names)
        rows = logged(names["trainer"])
        metric = "val_mse" if "val_mse" in rows[1] else "val_iou"
        first, last = float(rows[1][metric]), float(rows[6][metric])
        assert last < 0.9 * first if metric == "val_mse" else last > first + 0.05, (metric, first, last)
    assert all(len(text.strip().splitlines()) <= 35 for text in FILES.values())
