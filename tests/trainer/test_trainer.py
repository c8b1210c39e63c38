import csv
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    ThroughputMonitor,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fedssl import FederatedCallback, FederatedTrainer
from lightning_fedssl.algorithms import FedAvg
from lightning_fedssl.callbacks import FederatedCheckpoint, StaticBatchNorm
from lightning_fedssl.data import FederatedDataModule
from lightning_fedssl.functional.optimizers import half_momentum
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.models import CNN, MLP
from lightning_fedssl.state import ClientUpdate
from tests.algorithms.helpers import toy_shvr
from tests.toy import ToyData, assert_same, labeled_clients, sgd, toy_fedavg, toy_semifl, toy_trainer, weights


def test_same_seed_same_bits_and_other_seed_other_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[dict[str, torch.Tensor]] = []
    for seed in (3, 3, 4):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        torch.manual_seed(len(results))  # global state must not matter
        algorithm = toy_semifl()
        toy_trainer(tmp_path, logger=False).fit(algorithm, ToyData())
        results.append(weights(algorithm))
    assert_same(results[0], results[1])
    assert not torch.equal(results[0]["network.classifier.bias"], results[2]["network.classifier.bias"])


def test_global_model_is_no_live_storage(tmp_path: Path) -> None:
    algorithm = toy_semifl()
    toy_trainer(tmp_path, logger=False).fit(algorithm, ToyData())
    live = {p.data_ptr() for p in [*algorithm.parameters(), *algorithm.buffers()]}
    kept = [*algorithm.server.model().values(), *algorithm.server.extra["optimizer.aggregation"].values()]
    assert live.isdisjoint(t.data_ptr() for t in kept)


def test_fedavg_learns_and_weighs_by_samples(tmp_path: Path) -> None:
    algorithm = toy_fedavg(client_epochs=4)
    trainer = toy_trainer(tmp_path, max_rounds=12, logger=False)
    trainer.fit(algorithm, labeled_clients())
    assert trainer.callback_metrics["test/accuracy"] > 0.9
    counted = []

    def updates() -> Any:
        for size in (10, 30):
            counted.append(size)
            yield ClientUpdate(0, {"w": torch.tensor([float(size)])}, {}, size, 1)

    mean = algorithm.accumulate(updates())["model"].mean()
    assert mean is not None
    assert mean["w"].item() == 25.0
    algorithm.client_weighting = "uniform"
    mean = algorithm.accumulate(updates())["model"].mean()
    assert mean is not None
    assert mean["w"].item() == 20.0


def test_running_statistics_of_batch_norm_are_averaged_without_momentum(tmp_path: Path) -> None:
    """A server momentum on buffers could make a variance negative."""
    algorithm = toy_fedavg(network=partial(CNN, width=4, norm="batch"), aggregation_optimizer=half_momentum)
    toy_trainer(tmp_path, max_rounds=6, logger=False).fit(algorithm, labeled_clients())
    variances = [t for name, t in algorithm.server.buffers.items() if name.endswith("running_var")]
    assert len(variances) == 3
    assert all((v > 0).all() for v in variances)
    assert len(algorithm.server.extra["optimizer.aggregation"]) == len(algorithm.server.parameters)


def test_what_diverges_is_told_with_a_remedy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, huge = toy_trainer(tmp_path, logger=False), partial(torch.optim.SGD, lr=1e38)
    with pytest.raises(ValueError, match=r"round 1: the global model .* not finite.*optimizer\.init_args\.lr"):
        trainer.fit(toy_semifl(optimizer=huge, gradient_clip_norm=None), ToyData())
    with pytest.raises(ValueError, match=r"no client's update was accepted in any round.*optimizer\.init_args\.lr"):
        trainer.fit(algorithm := toy_fedavg(optimizer=huge), labeled_clients())
    assert "no client has trained" not in caplog.text
    for rounds, lr, start in ((1, 0.1, None), (2, 1e38, "last")):  # a resumed run had accepted updates before
        resumed = toy_trainer(tmp_path / "resumed", max_rounds=rounds, allow_changed=True, logger=False)
        resumed.fit(toy_fedavg(optimizer=partial(torch.optim.SGD, lr=lr)), labeled_clients(), ckpt_path=start)
    assert resumed.round_index == 2
    torch.nn.init.constant_(next(iter(algorithm.server.parameters.values())), torch.inf)
    trainer.test(algorithm, labeled_clients())
    assert "test/loss is not finite" in caplog.text


def test_files_of_a_run_and_its_scalars(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path)
    trainer.fit(toy_semifl(), ToyData())
    assert trainer.log_dir == str(tmp_path / "lightning_logs/version_0")
    folder = Path(trainer.log_dir)
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    files = {"hparams.yaml", "metrics.csv", "partition.json", "report.html"}
    assert files | {"checkpoints/last.ckpt", "checkpoints/best.ckpt"} <= names
    events = EventAccumulator(str(folder)).Reload()
    wanted = {
        "server/loss", "client/loss", "client/mask_rate", "pseudo_label/accuracy", "val/accuracy", "val/loss",
        "client/images", "client/steps", "server/steps", "test/accuracy", "time/round_s",
        "time/client_samples_per_s", "communication/upload_bytes",
        "communication/download_bytes",
    }  # fmt: skip
    assert wanted <= set(events.Tags()["scalars"])
    assert [e.step for e in events.Scalars("val/accuracy")] == [1, 2, 3]
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["val/accuracy"]]
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    for row, event in zip(rows, events.Scalars("val/accuracy"), strict=True):
        assert float(row["val/accuracy"]) == pytest.approx(event.value)


def test_bytes_by_hand(tmp_path: Path) -> None:
    """Down: all weights and statistics to each drawn client; up: the weights of those that trained."""
    algorithm = toy_semifl()
    trainer = toy_trainer(tmp_path, max_rounds=1, logger=False)
    trainer.fit(algorithm, ToyData())
    parameters = (1 * 4 + 4 * 8 + 8 * 16) * 9 + 2 * (4 + 8 + 16) + 16 * 3 + 3
    statistics = 2 * (4 + 8 + 16)
    assert trainer.callback_metrics["client/trained"] == 3
    assert trainer.callback_metrics["communication/download_bytes"] == 3 * 4 * (parameters + statistics)
    assert trainer.callback_metrics["communication/upload_bytes"] == 3 * 4 * parameters


class Hooks(FederatedCallback):
    """Notes every hook of ours."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def on_round_start(self, trainer: Any, algorithm: Any) -> None:
        self.called.append("round_start")

    def on_client_start(self, trainer: Any, algorithm: Any, data: Any, work: LocalWork) -> None:
        self.called.append(f"client_start {work.num_steps}")

    def on_client_batch_end(self, trainer: Any, algorithm: Any, step: int) -> None:
        self.called.append(f"client_batch {step}")

    def on_client_end(self, trainer: Any, algorithm: Any, update: ClientUpdate) -> None:
        self.called.append("client_end")

    def on_server_phase_end(self, trainer: Any, algorithm: Any) -> None:
        self.called.append("server_end")

    def on_server_batch_end(self, trainer: Any, algorithm: Any, step: int) -> None:
        self.called.append(f"server_batch {step}")

    def on_evaluation_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        self.called.append("evaluation " + " ".join(sorted(metrics)))

    def on_round_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        self.called.append("round_end")
        assert {"client/loss", "server/loss", "val/accuracy", "time/round_s"} <= metrics.keys()


def test_hooks_are_called_in_order(tmp_path: Path) -> None:
    hooks = Hooks()
    trainer = toy_trainer(tmp_path, max_rounds=1, clients_per_round=1, callbacks=[hooks], logger=False)
    trainer.fit(toy_semifl(server_epochs=0.5), ToyData())
    steps = int(hooks.called[1].split()[1])
    assert steps > 1
    assert hooks.called == [
        "round_start",
        f"client_start {steps}",
        *(f"client_batch {i}" for i in range(steps)),
        "client_end",
        "server_batch 0",
        "server_batch 1",
        "server_end",
        "evaluation val/accuracy val/largest_class_share val/loss",
        "round_end",
        "evaluation test/accuracy test/largest_class_share test/loss",
    ]


def test_a_callback_with_a_misspelt_hook_is_refused(tmp_path: Path) -> None:
    class Misspelt(FederatedCallback):
        def on_rund_end(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
            """Meant for the end of a round."""

    class Foreign(Callback):
        def on_nothing_we_know(self) -> None:
            """Of no loop."""

    with pytest.raises(ValueError, match=r"Misspelt has a method on_rund_end.*did you mean on_round_end\?"):
        toy_trainer(tmp_path, callbacks=[Misspelt()])
    with pytest.raises(ValueError, match=r"on_nothing_we_know.*no hook of that name"):
        toy_trainer(tmp_path, callbacks=[Foreign()])


def test_a_hook_that_a_federated_run_never_calls_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Batches(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            """Of Lightning's own loop."""

        def on_train_epoch_end(self, *_: Any) -> None:
            """Called here too."""

    toy_trainer(tmp_path, callbacks=[Batches()])
    assert "callback Batches overrides on_train_batch_end, which a federated run never calls" in caplog.text
    assert "on_train_epoch_end" not in caplog.text


def test_lightning_callbacks_with_a_round_as_the_epoch(tmp_path: Path) -> None:
    seen: list[int] = []
    callbacks = [
        EarlyStopping("val/loss", patience=1, mode="min", min_delta=100.0),
        ModelCheckpoint(tmp_path / "own", monitor="val/accuracy", mode="max", save_top_k=1, save_last=True),
        LambdaCallback(on_train_epoch_start=lambda trainer, _: seen.append(trainer.current_epoch)),
    ]
    trainer = toy_trainer(tmp_path, max_rounds=10, callbacks=callbacks)
    algorithm = toy_semifl()
    trainer.fit(algorithm, ToyData())
    assert trainer.round_index == 2
    assert seen == [0, 1]
    saved = sorted(p.name for p in (tmp_path / "own").iterdir())
    assert "last.ckpt" in saved
    assert len(saved) == 2
    assert torch.load(tmp_path / "own/last.ckpt", weights_only=True)["round"] in {1, 2}


def test_early_stopping_and_checkpoints_where_not_every_round_is_evaluated(tmp_path: Path) -> None:
    callbacks = [
        EarlyStopping("val/loss", patience=1, min_delta=100.0, check_on_train_epoch_end=False),
        ModelCheckpoint(tmp_path / "own", monitor="val/accuracy", mode="max"),
    ]
    trainer = toy_trainer(tmp_path, max_rounds=10, callbacks=callbacks, check_val_every_n_rounds=2)
    trainer.fit(toy_semifl(), ToyData())
    assert trainer.round_index == 4
    assert len(list((tmp_path / "own").iterdir())) == 1


def test_one_weight_of_two_layers_is_refused(tmp_path: Path) -> None:
    layers = [torch.nn.Linear(64, width) for width in (64, 64, 3)]
    network = torch.nn.Sequential(torch.nn.Flatten(), *layers)
    layers[1].weight = layers[0].weight
    with pytest.raises(ValueError, match=r"network\.1\.weight and network\.2\.weight are one weight"):
        toy_trainer(tmp_path).fit(FedAvg(network=network), labeled_clients())


def test_classes_that_contradict_the_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.num_classes is 7, but the data have 3"):
        toy_trainer(tmp_path).fit(toy_semifl(num_classes=7), ToyData())


def test_what_is_saved_has_the_statistics_of_its_weights_also_without_evaluation(tmp_path: Path) -> None:
    states = []
    for validation in (0.0, 0.1):
        algorithm = toy_semifl()
        trainer = toy_trainer(tmp_path, max_rounds=2)
        trainer.fit(algorithm, ToyData(validation=validation))
        saved = torch.load(Path(str(trainer.log_dir)) / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        assert_same(saved, weights(algorithm))
        states.append(saved)
    assert not torch.equal(states[0]["network.norms.0.running_var"], torch.ones(4))


def test_validation_of_another_partition_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_trainer(tmp_path).fit(toy_semifl(), ToyData())
    monkeypatch.setenv("PL_GLOBAL_SEED", "9")
    with pytest.raises(ValueError, match="seed_everything is 9"):
        toy_trainer(tmp_path).validate(toy_semifl(), ToyData(), ckpt_path="last")


@pytest.mark.parametrize(
    ("callback", "meant"),
    [
        (EarlyStopping("val_loss"), "val/loss"),
        (ModelCheckpoint(monitor="val_acc"), "val/accuracy"),
        (FederatedCheckpoint("val/acc"), "val/accuracy"),
    ],
)
def test_a_monitor_that_does_not_exist_is_refused_before_the_first_round(
    tmp_path: Path, callback: Callback, meant: str
) -> None:
    trainer = toy_trainer(tmp_path, callbacks=callback)
    with pytest.raises(ValueError, match=rf"{type(callback).__name__} has monitor .*did you mean {meant}\?"):
        trainer.fit(toy_semifl(), ToyData())
    assert trainer.round_index == 0
    trainer = toy_trainer(tmp_path, callbacks=ModelCheckpoint(monitor="client/losses"))
    with pytest.raises(ValueError, match=r"has monitor client/losses, .*did you mean client/loss"):
        trainer.fit(toy_semifl(), ToyData())
    toy_trainer(tmp_path, callbacks=[EarlyStopping("own", strict=False)]).fit(toy_semifl(), ToyData())


class ReadsTrainer(Callback):
    """Reads what Lightning's callbacks read."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        assert trainer.optimizers == [trainer.client_optimizer, trainer.run.server_optimizer]
        assert (trainer.lightning_module, trainer.logged_metrics) == (pl_module, trainer.callback_metrics)
        assert isinstance(trainer.checkpoint_callback, FederatedCheckpoint)
        stages = (trainer.training, trainer.testing, trainer.validating, trainer.predicting)
        assert (*stages, trainer.local_rank) == (True, False, False, False, 0)
        assert trainer.estimated_stepping_batches == trainer.max_rounds * trainer.num_training_batches
        assert isinstance(trainer.datamodule, ToyData)
        trainer.print("read")


def test_what_lightnings_callbacks_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=2, callbacks=ReadsTrainer())
    trainer.fit(toy_semifl(), ToyData())
    assert capsys.readouterr().out.count("read\n") == 2
    assert Path(getattr(trainer.checkpoint_callback, "best_model_path", "")).is_file()


class Remembers(FederatedCallback):
    """Has a state, which a checkpoint keeps under the name of the class."""

    def __init__(self, every: int) -> None:
        self.every = every

    def state_dict(self) -> dict[str, Any]:
        return {"every": self.every}


def test_two_states_of_one_name_are_refused(tmp_path: Path) -> None:
    """A resumed run would give both the state of the second."""
    with pytest.raises(ValueError, match="two Remembers would save their states under one name, and a resumed"):
        toy_trainer(tmp_path, callbacks=[Remembers(1), Remembers(2)]).fit(toy_semifl(), ToyData())
    toy_trainer(tmp_path, max_rounds=1, callbacks=[Remembers(1)]).fit(toy_semifl(), ToyData())


def test_checkpoints_that_would_replace_each_other_are_refused() -> None:
    class Elsewhere(FederatedCheckpoint):
        """Writes into another folder."""

        @staticmethod
        def folder(trainer: Any) -> Path:
            return Path("elsewhere")

    FederatedTrainer(callbacks=[FederatedCheckpoint(), Elsewhere()], accelerator="cpu")
    with pytest.raises(ValueError, match=r"two FederatedCheckpoint would write the same last\.ckpt"):
        FederatedTrainer(callbacks=[FederatedCheckpoint(), FederatedCheckpoint("val/loss", "min")], accelerator="cpu")


def test_lightnings_checkpoints_by_steps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ModelCheckpoint saves by rounds here.*every_n_epochs"):
        FederatedTrainer(callbacks=[ModelCheckpoint(every_n_train_steps=5)], accelerator="cpu")


@pytest.mark.parametrize("callback", [DeviceStatsMonitor(), EMAWeightAveraging()])
def test_callbacks_that_cannot_work_are_refused_by_name(callback: Callback) -> None:
    with pytest.raises(ValueError, match=rf"trainer\.callbacks: {type(callback).__name__} .* EarlyStopping"):
        FederatedTrainer(callbacks=[callback], accelerator="cpu")


@pytest.mark.parametrize(
    ("callback", "replacement"),
    [
        (LearningRateMonitor(), "every round logs the learning rate as lr"),
        (TQDMProgressBar(), "trainer.enable_progress_bar shows the progress"),
        (ModelSummary(), "print(model.network) shows the layers"),
        (OnExceptionCheckpoint("."), "--ckpt_path last"),
        (ThroughputMonitor(len), "time/client_samples_per_s"),
    ],
)
def test_callbacks_that_something_replaces_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, callback: Callback, replacement: str
) -> None:
    trainer = toy_trainer(tmp_path, callbacks=[callback])
    assert not any(isinstance(kept, type(callback)) for kept in trainer.callbacks)
    (record,) = caplog.records
    assert f"trainer.callbacks: {type(callback).__name__} is left out: " in record.message
    assert replacement in record.message


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed_stage_2", "xla"])
def test_strategies_that_split_a_model_are_refused_by_name(strategy: str) -> None:
    with pytest.raises(ValueError, match=rf"trainer\.strategy is {strategy}.*use auto or ddp"):
        FederatedTrainer(strategy=strategy, accelerator="cpu", devices=2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_rounds": 0}, r"trainer\.max_rounds is 0"),
        ({"clients_per_round": -3}, r"trainer\.clients_per_round is -3"),
        ({"check_val_every_n_rounds": 0}, r"trainer\.check_val_every_n_rounds is 0"),
        ({"accelerator": "abacus"}, r"trainer: accelerator abacus.*not available"),
        ({"clients_per_round": 2.5}, r"trainer\.clients_per_round is 2\.5: give a whole number"),
        ({"max_rounds": 2.0}, r"trainer\.max_rounds is 2\.0: give a whole number"),
        ({"max_rounds": "2"}, r"trainer\.max_rounds is 2: give a whole number"),
        ({"max_rounds": float("inf")}, r"trainer\.max_rounds is inf: give a whole number"),
    ],
)
def test_bad_settings_name_their_key(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FederatedTrainer(**settings)


def test_more_clients_per_round_than_clients(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.clients_per_round 9 is more than data\.num_clients 4"):
        toy_trainer(tmp_path, clients_per_round=9).fit(toy_semifl(), ToyData())


class OwnHook(FedAvg):
    """Overrides a hook of Lightning's loop."""

    def on_train_epoch_end(self) -> None:
        """Never called."""


class OwnOptimizer(FedAvg):
    """Makes its optimizer as a module for Lightning does."""

    def configure_optimizers(self) -> Any:
        """Never called."""


def test_a_module_of_lightning_and_its_hooks_are_refused_with_what_to_use(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path)
    with pytest.raises(TypeError, match=r"is not one: give a LightningModule to FedAvg\.from_lightning"):
        trainer.fit(LightningModule(), ToyData())  # type: ignore[arg-type]
    for method, hook in ((OwnHook, "on_train_epoch_end"), (OwnOptimizer, "configure_optimizers")):
        with pytest.raises(ValueError, match=rf"{method.__name__}\.{hook} is a hook of .*model\.optimizer"):
            trainer.fit(method(network=MLP), ToyData())
    with pytest.raises(TypeError, match=r"SemiFL is trained by lightning_fedssl\.FederatedTrainer"):
        Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit(toy_semifl(), ToyData())


def test_fast_dev_run_takes_one_step_each_and_writes_nothing(tmp_path: Path) -> None:
    hooks = Hooks()
    trainer = toy_trainer(
        tmp_path, fast_dev_run=True, max_rounds=50, clients_per_round=4, callbacks=[hooks, FederatedCheckpoint()]
    )
    (best := tmp_path / "checkpoints/best.ckpt").parent.mkdir()
    best.touch()
    trainer.fit(toy_semifl(), ToyData())
    assert trainer.round_index == 1
    assert [c for c in hooks.called if c.startswith("client_start")] == ["client_start 1"] * 2
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [best]


def test_validation_every_n_rounds_and_in_the_last(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=5, check_val_every_n_rounds=2)
    trainer.fit(toy_semifl(), ToyData())
    events = EventAccumulator(str(trainer.log_dir)).Reload()
    assert [e.step for e in events.Scalars("val/loss")] == [2, 4, 5]


def test_without_validation_images_training_works_and_validate_says_why_not(tmp_path: Path) -> None:
    algorithm, data = toy_semifl(), ToyData(validation=0)
    trainer = toy_trainer(tmp_path)
    trainer.fit(algorithm, data)
    assert "val/accuracy" not in trainer.callback_metrics
    assert not (Path(str(trainer.log_dir)) / "checkpoints/best.ckpt").exists()
    with pytest.raises(ValueError, match=r"data\.validation is 0"):
        toy_trainer(tmp_path).validate(algorithm, data)


@pytest.mark.parametrize(("precision", "dtype"), [("64-true", torch.float64), ("32-true", torch.float32)])
def test_precision_reaches_weights_and_views(tmp_path: Path, precision: Any, dtype: torch.dtype) -> None:
    algorithm = toy_semifl()
    trainer = toy_trainer(tmp_path, max_rounds=1, precision=precision, logger=False)
    trainer.fit(algorithm, ToyData())
    assert {t.dtype for t in algorithm.server.parameters.values()} == {dtype}
    assert trainer.local_data(0).plain(torch.tensor([0])).dtype == dtype


def test_bfloat16_arithmetic_on_32_bit_weights(tmp_path: Path) -> None:
    plain, mixed = toy_semifl(), toy_semifl()
    toy_trainer(tmp_path, logger=False).fit(plain, ToyData())
    trainer = toy_trainer(tmp_path, logger=False, precision="bf16-mixed")
    trainer.fit(mixed, ToyData())
    a, b = (algorithm.server.parameters["network.classifier.weight"] for algorithm in (plain, mixed))
    assert b.dtype == torch.float32
    assert not torch.equal(a, b)
    assert trainer.callback_metrics["test/accuracy"] > 0.5


def test_own_loggers_and_none(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, logger=CSVLogger(tmp_path, name="mine"))
    trainer.fit(toy_semifl(), ToyData())
    assert (tmp_path / "mine/version_0/metrics.csv").is_file()
    assert not (tmp_path / "lightning_logs").exists()
    silent = toy_trainer(tmp_path / "silent", logger=False)
    silent.fit(toy_semifl(), ToyData())
    assert silent.log_dir is None
    assert (tmp_path / "silent/checkpoints/last.ckpt").is_file()


def test_evaluation_and_prediction_of_a_trained_model(tmp_path: Path) -> None:
    algorithm, data = toy_semifl(), ToyData()
    trainer = toy_trainer(tmp_path)
    trainer.fit(algorithm, data)
    tested = float(trainer.callback_metrics["test/accuracy"])
    fresh = toy_semifl()
    later = toy_trainer(tmp_path)
    assert later.test(fresh, ToyData(), ckpt_path="last")[0]["test/accuracy"] == tested
    expected = {"val/accuracy", "val/loss", "val/largest_class_share"}
    assert set(later.validate(fresh, ToyData(), ckpt_path="best")[0]) == expected
    (probabilities,) = later.predict(fresh, ToyData(), ckpt_path="last")
    assert probabilities.shape == (60, 3)
    right = probabilities.argmax(1) == torch.arange(60) % 3
    assert float(right.double().mean()) == pytest.approx(tested)
    with (Path(str(later.log_dir)) / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["prediction"]) for row in rows] == probabilities.argmax(1).tolist()


def test_the_users_callback_takes_the_place_of_the_default(tmp_path: Path) -> None:
    class Mine(StaticBatchNorm):
        pass

    mine: list[Any] = [
        Mine(source="pooled"),
        FederatedCheckpoint(monitor="val/loss", mode="min", every_n_rounds=2),
    ]
    trainer = toy_trainer(tmp_path, callbacks=mine)
    trainer.fit(toy_semifl(), ToyData())
    for callback in mine:
        kind = FederatedCheckpoint if callback is mine[1] else StaticBatchNorm
        assert [c for c in trainer.callbacks if isinstance(c, kind)] == [callback]
    assert mine[1].best_round in (1, 2, 3)
    assert torch.load(Path(str(trainer.log_dir)) / "checkpoints/last.ckpt", weights_only=True)["round"] == 3


class Returns(FedAvg):
    """Returns a given loss."""

    loss: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss


def returning(loss: Any) -> Returns:
    algorithm = Returns(network=partial(CNN, width=4), optimizer=sgd)
    algorithm.loss = loss
    return algorithm


def test_a_run_whose_batches_are_all_skipped_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = ToyData(label_location="clients", num_labels="all")
    toy_trainer(tmp_path, max_rounds=2).fit(returning(None), data)
    assert caplog.text.count("no client has trained, because Returns.training_step returned None for every batch") == 1


@pytest.mark.parametrize(("clients", "drawn"), [(4, 4), (12, 10)])
def test_without_a_number_ten_clients_are_drawn_or_all_of_few(tmp_path: Path, clients: int, drawn: int) -> None:
    trainer = FederatedTrainer(max_rounds=1, accelerator="cpu", logger=False, default_root_dir=tmp_path)
    trainer.fit(toy_semifl(), ToyData(num_clients=clients))
    assert len(trainer.cohort) == drawn


@pytest.mark.parametrize(("validation", "warned"), [(0.1, True), (0.3, False), (0, False)])
def test_few_validation_images_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, validation: float, warned: bool
) -> None:
    trainer = FederatedTrainer(max_rounds=1, accelerator="cpu", logger=False, default_root_dir=tmp_path)
    with caplog.at_level(logging.WARNING, logger="lightning_fedssl"):
        trainer.fit(toy_semifl(), ToyData(validation=validation))
    assert ("there are 12 validation images for 3 classes" in caplog.text) == warned


@pytest.mark.parametrize("key", ["optimizer", "server_optimizer", "aggregation_optimizer"])
def test_a_finished_optimizer_is_refused_with_the_function_to_give(key: str) -> None:
    made = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rf"model\.{key} is a SGD .* give functools\.partial\(torch\.optim\.SGD"):
        toy_semifl(**{key: made})


def test_lightnings_names_of_keys_are_refused_with_ours(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"FederatedTrainer has no max_epochs: .*trainer\.max_rounds"):
        FederatedTrainer(max_epochs=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"SemiFL has no server_momentum: give aggregation_optimizer"):
        toy_semifl(server_momentum=0.5)
    with pytest.raises(TypeError, match=r"^Rprop\.__init__.* 'weight_decay'"):  # not a key of the method
        toy_shvr(optimizer=partial(torch.optim.Rprop, weight_decay=1))  # type: ignore[call-arg]
    trainer = toy_trainer(tmp_path)
    with pytest.raises(AttributeError, match=r"no gradient_clip_val: give model\.gradient_clip_norm"):
        _ = trainer.gradient_clip_val
    with pytest.raises(AttributeError, match="object has no attribute 'client_optimizer'"):
        _ = trainer.optimizers  # of a property the inner error


def test_commands_after_fit_take_the_last_model_and_data_as_lightnings_do(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=1)
    with pytest.raises(ValueError, match=r"trainer\.test\(\) has run nothing yet"):
        trainer.test()
    with pytest.raises(TypeError, match=r"not list\. .*from_datasets"):
        trainer.fit(toy_semifl(), train_dataloaders=[1])
    trainer.fit(toy_semifl(), ToyData())
    measured = trainer.callback_metrics["test/loss"]
    assert trainer.test()[0]["test/loss"] == measured == trainer.test(ckpt_path="last")[0]["test/loss"]
    assert trainer.predict()[0].shape == (len(trainer.datamodule.test_labels), 3)


@pytest.mark.parametrize("precision", [64, "64"])
def test_lightnings_short_names_of_precisions(tmp_path: Path, precision: int | str) -> None:
    trainer = toy_trainer(tmp_path, max_rounds=1, precision=precision, deterministic="warn", logger=False)
    trainer.fit(toy_semifl(), ToyData())
    assert {value.dtype for value in trainer.algorithm.network.parameters()} == {torch.float64}
    with pytest.raises(ValueError, match=r"trainer\.logger is 'csv'"):
        FederatedTrainer(logger="csv")  # type: ignore[arg-type]


def test_data_without_a_usual_view_need_both(tmp_path: Path) -> None:
    samples = (torch.rand(6, 2), torch.arange(6) % 2)
    with pytest.raises(ValueError, match=r"data\.weak is auto .* give both"):
        FederatedDataModule.from_datasets(train=samples, test=samples)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples))
    with pytest.raises(TypeError, match=r"not DataLoader.*from_datasets\("):
        FederatedTrainer(default_root_dir=tmp_path).fit(toy_semifl(), loader)  # type: ignore[arg-type]
