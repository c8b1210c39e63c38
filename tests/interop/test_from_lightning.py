"""LightningModules as the models of a federation: training by hand, ranks, resuming, files, refusals, the page."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, sampler

from lightning_fedssl import FedAvg, FixMatch, Median, PseudoLabelPoison, sampling
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.callbacks import ClientEvaluation
from lightning_fedssl.functional.averaging import WeightedSum
from lightning_fedssl.functional.schedules import Cosine
from lightning_fedssl.interop.fits import counters_of
from lightning_fedssl.interop.loaders import samples_of
from lightning_fedssl.state import ClientUpdate
from lightning_fedssl.updates.acceptance import check_payload
from tests.toy import ToyData, assert_same, forked, toy_trainer
from tests.trainer.helpers import logged

PAGE = (Path(__file__).parents[2] / "docs" / "lightning_module.md").read_text(encoding="utf-8")


class Line(LightningModule):
    """A regression with a frozen layer."""

    def __init__(self, lr: float = 0.05, schedulers: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net: Any = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.net[1].eval()
        self.net[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("train_mse", loss, on_step=False, on_epoch=True)
        return loss

    def unlabeled_training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return unlabeled(self, batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_mse", F.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
        make = self.hparams["schedulers"]
        return optimizer if make is None else {"optimizer": optimizer, "lr_scheduler": make(optimizer)}


class Manual(Line):
    """A module with optimization of its own."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        cast(Any, self.optimizers()).step()


class Noisy(Dataset[Any]):
    """Samples with NumPy's random numbers in them, as a user's own augmentation has."""

    def __init__(self, seed: int, count: int) -> None:
        self.x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + float(np.random.rand()) / 10, self.x[index].sum(0, keepdim=True)


class Lazy(Sequence[Any]):
    """Loaders that are made when they are taken, and recorded."""

    def __init__(self, count: int) -> None:
        self.clients = count
        self.made: list[int] = []

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: Any) -> Any:
        self.made.append(client)
        return DataLoader(Noisy(client, 6 + 2 * client), batch_size=4, shuffle=True)


def plain(count: int = 3) -> list[DataLoader[Any]]:
    """Loaders whose batches are the same at every pass."""
    data = [Noisy(k, 6 + 2 * k).x for k in range(count)]
    return [DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4) for x in data]


def fit(folder: Path, federation: Any, ranks: int = 1, **kwargs: Any) -> tuple[dict[str, Tensor], Any]:
    """The global weights under the module's names, and the trainer of a run."""
    arguments: dict[str, Any] = {"max_rounds": 1, "clients_per_round": 3, **forked(ranks), **kwargs}
    ckpt_path = arguments.pop("ckpt_path", None)
    trainer = toy_trainer(folder, **arguments)
    model, data = federation
    trainer.fit(model, data, ckpt_path=ckpt_path)
    weights = model.server.model()
    return {name.removeprefix("network."): t.clone() for name, t in weights.items()}, trainer


Step = Callable[[Any, Any], Tensor]
"""The loss of a batch of a module."""


def sgd(module: Line, step: Step, batches: Any, epochs: int = 1) -> None:
    optimizer = module.configure_optimizers()
    for batch in [batch for _ in range(epochs) for batch in batches]:
        optimizer.zero_grad()
        step(module, batch).backward()
        optimizer.step()


def average(module: Line, clients: Sequence[Any], sizes: list[int], step: Step, round_index: int, epochs: int) -> None:
    """One round of federated averaging without Lightning's Trainer and without this package's loop."""
    sent, total = {n: t.clone() for n, t in module.state_dict().items()}, WeightedSum()
    for client in sampling.cohort(sampling.global_seed(), round_index, len(clients), len(clients)):
        module.load_state_dict(sent)
        sgd(module, step, clients[client], epochs)
        total.add({n: t.clone() for n, t in module.state_dict().items() if t.is_floating_point()}, sizes[client])
    module.load_state_dict(total.mean() or {}, strict=False)


def labeled(module: Any, batch: Any) -> Tensor:
    return F.mse_loss(module(batch[0]), batch[1])


def unlabeled(module: Any, batch: Any) -> Tensor:
    return F.mse_loss(module(batch[0]), module(batch[1]))


class Steps(FederatedCallback):
    """Records the numbers of the clients' steps."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_client_batch_end(self, trainer: Any, algorithm: Any, step: int) -> None:
        self.seen.append(step)


def test_a_run_is_the_training_written_by_hand(tmp_path: Path) -> None:
    lightning.seed_everything(3, verbose=False)
    ours, own, steps = Line(), Line(), Steps()
    found, _ = fit(tmp_path, FedAvg.from_lightning(ours, plain(), client_epochs=2), max_rounds=2, callbacks=[steps])
    for round_index in (1, 2):
        average(own, plain(), [6, 8, 10], labeled, round_index, 2)
    assert_same(found, {n: t for n, t in own.state_dict().items() if n in found})
    assert_same(dict(ours.state_dict()), dict(own.state_dict()))
    assert steps.seen[:14] == [k for n in sampling.cohort(3, 1, 3, 3) for k in range([4, 4, 6][n])]
    assert "training_step" not in vars(ours)


def both(module: Any, batch: Any) -> Tensor:
    return labeled(module, batch[0]) + unlabeled(module, batch[1])


@pytest.mark.parametrize("where", ["server", "clients"])
def test_unlabeled_batches_are_trained_as_written_by_hand(tmp_path: Path, where: str) -> None:
    x, y, ours, own = torch.randn(8, 2), torch.randn(8, 1), Line(), Line()
    views = [DataLoader(TensorDataset(x * 4 + k, x * 4 - k), batch_size=4) for k in range(2)]
    few = DataLoader(TensorDataset(x, y), batch_size=8)
    if where == "clients":
        federation = FedAvg.from_lightning(ours, [{"labeled": few, "unlabeled": loader} for loader in views])
        pairs = [[(batch, other) for other in loader for batch in few] for loader in views]
        average(own, pairs, [16, 16], both, 1, 1)
    else:
        federation = FedAvg.from_lightning(ours, views, server=few, server_epochs=2)
        average(own, views, [8, 8], unlabeled, 1, 1)
        sgd(own, labeled, few, epochs=2)
    found, trainer = fit(tmp_path, federation, clients_per_round=2)
    for name, t in found.items():
        torch.testing.assert_close(t, own.state_dict()[name])
    assert ("server/loss" in trainer.callback_metrics) == (where == "server")


class Terminates(FederatedCallback):
    """Sends SIGTERM within the first client's fit of the second round."""

    sent = False

    def on_client_batch_end(self, trainer: Any, algorithm: Any, step: int) -> None:
        if trainer.round_index == 2 and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


def test_two_ranks_are_one_and_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    clients: list[Lazy] = []

    def make() -> Any:
        lightning.seed_everything(3, verbose=False)
        clients.append(Lazy(50))
        return FedAvg.from_lightning(Line(), clients[-1], client_epochs=2, val_dataloaders=plain(1))

    first = make()
    assert clients[0].made == []
    whole, trainer = fit(tmp_path / "1", first, max_rounds=4)
    assert clients[0].made == [k for r in (1, 2, 3, 4) for k in sampling.cohort(3, r, 50, 3)]
    two, of_two = fit(tmp_path / "2", make(), ranks=2, max_rounds=4)
    assert_same(whole, two)
    assert logged(trainer) == logged(of_two)
    _, stopped = fit(tmp_path / "3", make(), max_rounds=4, callbacks=[Terminates()])
    assert stopped.round_index == 2
    last = Path(stopped.log_dir) / "checkpoints" / "last.ckpt"
    resumed = make()
    with torch.no_grad():
        resumed[0].network.net[1].weight.fill_(7)  # frozen: neither sent nor averaged
    assert_same(whole, fit(tmp_path / "4", resumed, max_rounds=4, ckpt_path=last)[0])
    assert float(resumed[0].network.net[1].weight[0]) == 1


def test_scalars_are_means_over_the_clients_samples_and_lr_is_the_rate(tmp_path: Path) -> None:
    module, clients = Line(lr=0.02), plain()
    federation = FedAvg.from_lightning(module, clients, val_dataloaders=clients[0], schedule=Cosine(rounds=1, final=0))
    with torch.no_grad():
        losses = [[labeled(module, b) for b in loader] for loader in clients]
        of_samples = [torch.cat([(module(b[0]) - b[1]) ** 2 for b in loader]).mean() for loader in clients]
    found = logged(fit(tmp_path, federation, max_rounds=2)[1])
    assert [float(found[r]["lr"]) for r in (1, 2)] == pytest.approx([0.02, 0])
    assert float(found[1]["val_mse"]) == pytest.approx(float(found[2]["val_mse"]), rel=1e-5)  # the second rate is 0
    frozen = FedAvg.from_lightning(Line(lr=0.0), clients, val_dataloaders=clients[0])
    of_frozen, counts = logged(fit(tmp_path / "0", frozen)[1])[1], [6, 8, 10]
    expected = {
        "client/loss": sum(n * float(torch.stack(part).mean()) for n, part in zip(counts, losses, strict=True)) / 24,
        "train_mse": sum(n * float(mean) for n, mean in zip(counts, of_samples, strict=True)) / 24,
        "val_mse": float(of_samples[0]),
        "client/images": 24,
    }
    assert {name: float(of_frozen[name]) for name in expected} == pytest.approx(expected, rel=1e-5)


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
        (partial(DataLoader, batch_size=32, sampler=sampler.SubsetRandomSampler(range(13))), 13),
        (partial(DataLoader, sampler=sampler.RandomSampler(range(100), replacement=True, num_samples=35)), 35),
        (
            partial(
                DataLoader,
                batch_sampler=sampler.BatchSampler(sampler.SubsetRandomSampler(range(9)), 4, drop_last=False),
            ),
            9,
        ),
        (
            partial(
                DataLoader, batch_sampler=sampler.BatchSampler(sampler.SubsetRandomSampler(range(9)), 4, drop_last=True)
            ),
            8,
        ),
        (partial(DataLoader, batch_sampler=[[1, 2], [3]]), 3),
        (partial(DataLoader, batch_size=None, sampler=sampler.SubsetRandomSampler(range(4))), 4),
        (lambda data: DataLoader(SizedStream(), batch_size=3), 7),
        (lambda data: DataLoader(SizedStream(), batch_size=3, drop_last=True), 6),
    ],
)
def test_a_client_weighs_what_its_epoch_draws(make: Any, drawn: int) -> None:
    loader = make(TensorDataset(torch.randn(100, 1)))
    assert samples_of({"labeled": loader}) == drawn


class Seen(Callback):
    """Records the class of the module that a callback of Lightning's gets."""

    def __init__(self) -> None:
        self.kinds: list[type] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.kinds.append(type(pl_module))


def test_files_callbacks_and_lines_are_those_of_the_users_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    class Drawing(Line):
        def on_train_end(self) -> None:
            self.logger.experiment.add_scalar("own", 1.0)  # type: ignore[union-attr]

    module, seen = Drawing(lr=0.25), Seen()
    federation = FedAvg.from_lightning(module, plain(), val_dataloaders=Lazy(1)[0])
    _, trainer = fit(tmp_path, federation, enable_progress_bar=True, callbacks=[seen])
    assert seen.kinds == [Drawing]
    folder = Path(trainer.log_dir) / "checkpoints"
    loaded = Drawing.load_from_checkpoint(folder / "last.ckpt", map_location="cpu")
    assert loaded.hparams["lr"] == 0.25
    assert_same(dict(loaded.state_dict()), dict(module.state_dict()))
    assert json.loads((folder / "config.json").read_text())["lr"] == 0.25
    description = json.loads((folder / "model.json").read_text())
    assert description["class_names"] == []
    assert "val_mse" in description["metrics"]
    assert "1602.05629" in description["citation"]
    written = capsys.readouterr().out
    assert f"val_mse {float(trainer.callback_metrics['val_mse']):.4g}" in written
    assert not re.search("class|labelled", written)
    assert not [found for found in recwarn if "dataloader" in str(found.message)]


def test_fedprox_adds_the_gradient_of_its_term(tmp_path: Path) -> None:
    own, client, mu = Line(), plain(1), 0.5
    sent = [w.detach().clone() for w in own.parameters()]

    def step(module: Any, batch: Any) -> Tensor:
        distances = [(w - start).square().sum() for w, start in zip(module.parameters(), sent, strict=True)]
        return labeled(module, batch) + mu / 2 * torch.stack(distances).sum()

    found, _ = fit(tmp_path, FedAvg.from_lightning(Line(), client, prox_mu=mu), clients_per_round=1)
    sgd(own, step, client[0])
    for name, t in found.items():
        torch.testing.assert_close(t, own.state_dict()[name])


def test_a_layer_may_stay_at_its_client(tmp_path: Path) -> None:
    """One client alone trains as without: its own layer goes on from where it was."""
    one = plain()[:1]
    whole, _ = fit(tmp_path, FedAvg.from_lightning(Line(), one), max_rounds=2, clients_per_round=1)
    model, data = FedAvg.from_lightning(Line(), one, personal="net.2")
    shared, _ = fit(tmp_path, (model, data), max_rounds=2, clients_per_round=1)
    own = {name.removeprefix("network."): t for name, t in model.own_part(0).items()}
    assert own.keys() == {"net.2.weight", "net.2.bias"}
    for name, t in {**shared, **own}.items():
        torch.testing.assert_close(t, whole[name], rtol=0, atol=1e-6)


class Built(Line):
    """A module whose hooks build its layers: anew at every call, as in Lightning's guide."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def setup(self, stage: str) -> None:
        self.net = nn.Sequential(nn.Linear(2, 4), nn.ReLU())

    def configure_model(self) -> None:
        self.net.append(nn.Linear(4, 1))


def test_layers_of_hooks_are_built_once(tmp_path: Path) -> None:
    ours, own = Built(), Line()
    federation = FedAvg.from_lightning(ours, plain(), val_dataloaders=plain(1))
    own.net = copy.deepcopy(ours.net)
    found, _ = fit(tmp_path, federation, max_rounds=2)
    for round_index in (1, 2):
        average(own, plain(), [6, 8, 10], labeled, round_index, 1)
    for name, t in own.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], t)
    assert set(found) == {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}
    assert "setup" not in vars(ours)


class Ramp(Line):
    """A module that counts its steps, and records what Lightning counts."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("positions", torch.arange(3), persistent=False)  # a constant, which nobody sends
        self.seen: list[tuple[int, int, int]] = []
        self.lasts: set[int | None] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((int(self.steps), self.current_epoch, self.global_step))
        self.lasts.add(self.trainer.max_epochs)
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_epoch", float(self.current_epoch))


def test_manual_optimization_skips_no_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights, _ = fit(tmp_path, FedAvg.from_lightning(Manual(), plain()))
    assert not torch.equal(weights["net.0.weight"], Line().net[0].weight)
    assert "no client has trained" not in caplog.text


def test_counters_go_on_from_round_to_round(tmp_path: Path) -> None:
    module, loaders = Ramp(), [plain(3)[k] for k in (0, 0, 2)]  # 2, 2 and 3 steps an epoch
    federation = FedAvg.from_lightning(module, loaders, client_epochs=2, val_dataloaders=loaders[0])
    _, trainer = fit(tmp_path, federation, max_rounds=2)
    assert int(module.steps) == 2 * 6  # the largest count of a client
    assert counters_of(module) == ["steps"]
    sent = ClientUpdate(0, {}, {}, 6, 4, {"network.steps": torch.tensor(2**62)})
    assert "not possible" in str(check_payload(federation[0], sent))
    assert {count for count, _, _ in module.seen[14:]} == set(range(6, 12))
    assert {epoch for _, epoch, _ in module.seen[:14]} == {0, 1}
    assert {epoch for _, epoch, _ in module.seen[14:]} == {2, 3}
    assert module.lasts == {4}  # of the run, so that a ramp over them ends
    assert {step for _, _, step in module.seen[14:]} == {4, 5, 6, 7} | set(range(6, 12))
    assert float(trainer.callback_metrics["val_epoch"]) == 4


def test_rules_combine_modules_whose_only_whole_numbers_are_those_of_batch_norm(tmp_path: Path) -> None:
    """Of two equal and one other client the median is that of the two."""
    two = plain(3)[:1] * 2
    found, _ = fit(tmp_path, FedAvg.from_lightning(Line(), [*two, plain(3)[2]]), updates=[Median()])
    alone, _ = fit(tmp_path, FedAvg.from_lightning(Line(), two), updates=[], clients_per_round=2)
    for name, t in alone.items():
        torch.testing.assert_close(found[name], t)
    with pytest.raises(ValueError, match=r"Median cannot be used with CountingFedAvg.*accumulate"):
        fit(tmp_path, FedAvg.from_lightning(Ramp(), plain(3)), updates=[Median()])


def test_a_module_without_optimizer_is_averaged_as_it_is(tmp_path: Path) -> None:
    module = Bare()
    fit(tmp_path, FedAvg.from_lightning(module, plain()))
    assert float(module.weight) == 1


def test_a_compiled_module_and_a_last_batch_of_one_are_trained(tmp_path: Path) -> None:
    module = Line()
    module.net[1] = nn.BatchNorm1d(4)
    rows = [(torch.ones(2), torch.ones(1))] * 5
    federation = FedAvg.from_lightning(torch.compile(module, backend="eager"), [DataLoader(rows, batch_size=4)])  # type: ignore[arg-type]
    before = module.net[0].weight.clone()
    fit(tmp_path, federation, clients_per_round=1)
    assert not torch.equal(before, module.net[0].weight)
    assert not module.net[1]._forward_hooks


LINE = partial(FedAvg.from_lightning, Line())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixMatch.from_lightning(Line(), plain()), "take FedAvg.from_lightning.*unlabeled_training_step"),
        (lambda: FedAvg.from_lightning(nn.Linear(1, 1), plain()), "is not a LightningModule"),  # type: ignore[arg-type]
        (lambda: FedAvg.from_lightning(Line, plain()), "class .*Line.* is not a LightningModule"),  # type: ignore[arg-type]
        (lambda: LINE(plain(), freeze=["net"]), "freeze is what the module itself decides"),
        (lambda: LINE([]), "clients is an empty list"),
        (lambda: LINE(plain(1)[0]), "clients is a DataLoader"),  # type: ignore[arg-type]
        (lambda: LINE(ToyData()), "clients is a ToyData"),  # type: ignore[arg-type]
        (lambda: LINE([iter([1])]), r"clients\[0\] is a list_iterator"),
        (lambda: LINE([{"labelled": plain(1)[0]}]), r"clients\[0\] has 'labelled': give labeled, unlabeled or both"),
        (lambda: LINE([DataLoader(Stream())]), r"clients\[0\] is a DataLoader .* IterableDataset needs __len__"),
        (lambda: LINE([DataLoader([1], 2, drop_last=True)]), r"clients\[0\] is a DataLoader"),  # type: ignore[arg-type]
        (lambda: LINE(plain(), client_epochs=0.5), r"model\.client_epochs is 0\.5: give a whole number"),
        (lambda: FedAvg.from_lightning(Manual(), plain(), prox_mu=0.1), "manual optimization"),
        (lambda: FedAvg.from_lightning(Fails(), plain()), r"Fails\.setup fails when .* build the module in __init__"),
        (lambda: FedAvg.from_lightning(Unsized(), plain()), r"size of net\.weight is not known yet: call the module"),
        (lambda: FedAvg.from_lightning(Bare(), plain(), server=plain(1)[0]), "unlabeled_training_step.* in Bare"),
    ],
)
def test_what_cannot_be_trained_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


class Bare(LightningModule):
    """A module with a step that trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight * 1

    def configure_optimizers(self) -> None: ...


class Fails(Bare):
    def setup(self, stage: str) -> None:
        raise RuntimeError("no data")


class Unsized(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LazyLinear(1)


class Averaging(Line):
    def configure_callbacks(self) -> Any:
        return StochasticWeightAveraging(0.1)


def plateau(optimizer: Any) -> Any:
    return {"scheduler": lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "val_mse"}


@pytest.mark.parametrize(
    ("federation", "trainer", "message"),
    [
        (lambda: LINE(plain()), {"updates": [PseudoLabelPoison(0.5)]}, "PseudoLabelPoison"),
        (lambda: LINE(plain()), {"callbacks": [ClientEvaluation()]}, "ClientEvaluation needs one class label"),
        (lambda: FedAvg.from_lightning(Averaging(), plain()), {}, "leave it out, the server averages"),
        (lambda: LINE([DataLoader(TensorDataset(torch.ones(4, 3), torch.ones(4, 1)))]), {"clients_per_round": 1},
         r"clients\[0\], a batch of shapes \[\(1, 3\), \(1, 1\)\]: RuntimeError: .*mat1"),
        (lambda: FedAvg.from_lightning(Line(schedulers=plateau), plain()), {},
         r"clients\[\d\]: .*val_mse.*; a client has no validation: monitor"),
        (lambda: FedAvg.from_lightning(Line(schedulers=partial(lr_scheduler.StepLR, step_size=1)), plain(),
                                       schedule=Cosine()), {"max_rounds": 2}, "the schedulers of configure_optimizers"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_in_one_line(
    tmp_path: Path, federation: Any, trainer: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, federation(), **trainer)


def test_the_page_runs_and_its_modules_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in re.findall(r'```python title="([\w.]+)"\n(.*?)```', PAGE, re.DOTALL):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {"__name__": "page"}
    lightning.seed_everything(1, verbose=False)
    for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(text.replace("max_rounds=2", "max_rounds=6"), "lightning_module.md", "exec"), names)
        rows = logged(names["trainer"])
        metric = "val_mse" if "val_mse" in rows[1] else "val_iou"
        first, last = float(rows[1][metric]), float(rows[6][metric])
        assert last < 0.9 * first if metric == "val_mse" else last > first + 0.05, (metric, first, last)
