"""FedAvg, FedProx or FixMatch of any LightningModule: a client's round is a fit of Lightning's own
``Trainer``.

McMahan et al., AISTATS 2017, arXiv 1602.05629; FedProx: Li et al., MLSys 2020, arXiv 1812.06127;
FixMatch: Sohn et al., NeurIPS 2020, arXiv 2001.07685.

The batches may have any structure, the task may be any, and all hooks are called as Lightning calls
them. Each fit takes about 30 milliseconds more than the steps themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal, cast

import numpy as np
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms.fedavg import FedAvg
from lightning_fedssl.algorithms.fixmatch import FixMatch
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.data.partition.federated_split import FederatedSplit
from lightning_fedssl.data.partition.natural import NaturalClients
from lightning_fedssl.data.sources.arrays import Datasets
from lightning_fedssl.data.sources.base import LoadedData
from lightning_fedssl.functional.frozen import freeze
from lightning_fedssl.local_training.sequential import loss_of
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.models import NetworkFactory

_OF_THE_MODULE = {
    "network",
    "optimizer",
    "server_optimizer",
    "keep_client_optimizer",
    "keep_server_optimizer",
    "init_from",
    "init_except",
    "freeze",
    "num_classes",
    "in_shape",
}
"""Arguments of a method that a LightningModule decides itself."""


class LoaderData(FederatedDataModule):
    """Data loaders of clients and server in place of a data set.

    The partition is that of their samples.

    Args:
        clients: A loader for each client.
        server: The server's loader, if it has labels.
        evaluated: The loaders for ``validate`` and ``test``, as Lightning's Trainer takes them;
            None for none.

    Raises:
        ValueError: A loader has no length, or no batch; names it.
    """

    def __init__(
        self, clients: Sequence[DataLoader[Any]], server: Any, evaluated: Mapping[str, Any]
    ) -> None:
        if isinstance(clients, DataLoader):
            raise ValueError(
                "from_lightning: clients is one DataLoader: give a list with a loader for each "
                "client"
            )
        owners = [
            k
            for k, loader in enumerate(clients)
            for _ in range(samples_of(loader, f"clients[{k}]"))
        ]
        if not owners:
            raise ValueError(
                "from_lightning: clients is empty: give one data loader for each client"
            )
        stand_ins = TensorDataset(
            torch.zeros(len(owners), 1), torch.zeros(len(owners), dtype=torch.int64)
        )
        source = Datasets(stand_ins, stand_ins, client_ids=owners, class_names=("sample", "none"))
        super().__init__(
            source,
            num_clients=len(clients),
            num_labels="all",
            label_location="clients",
            partition=NaturalClients(),
            validation=0,
            weak="none",
            strong="none",
        )
        self.clients = clients
        self.server = server
        self.evaluated = evaluated

    def _report(self, loaded: LoadedData) -> None:
        """Nothing: the loaders' samples are not read."""

    def _assign(self, split: FederatedSplit, used: Tensor) -> None:
        """Takes the partition; of the stand-ins only the numbers of samples say something about the
        loaders.
        """
        super()._assign(split, used)
        self.spec = dataclasses.replace(self.spec, name="data loaders", class_names=())
        sizes = self.statistics.sizes
        no_class = sizes.new_zeros(len(sizes), 0)
        self.statistics = dataclasses.replace(
            self.statistics,
            class_counts=no_class,
            labeled_class_counts=no_class,
            unknown_counts=sizes,
        )

    @property
    def has_validation(self) -> bool:
        """Whether there is a loader to validate on."""
        return self.evaluated["validate"] is not None

    def evaluation_batches(
        self,
        stage: Literal["validate", "test"],
        dtype: torch.dtype = torch.float32,
        shard: tuple[int, int] = (0, 1),
    ) -> Iterator[Any]:
        """The loaders of a stage as one batch of the first rank; none without loaders."""
        if self.evaluated[stage] is not None and shard[0] == 0:
            yield self.evaluated[stage]

    def predict_batches(
        self, dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Refuse to predict: the module may have any output."""
        raise ValueError(
            "predict with lightning.Trainer().predict(module, loader): the module has the global "
            "weights"
        )


class LightningFedAvg(FedAvg):
    """FedAvg and FedProx of a LightningModule; made by :meth:`FedAvg.from_lightning`.

    Args:
        network: Returns the module.
        kwargs: The arguments of the method.
    """

    def __init__(self, network: Callable[[], LightningModule], **kwargs: Any) -> None:
        # The scalar lr is then the schedule's factor of the rates that the module has chosen.
        super().__init__(
            network=cast(NetworkFactory, network),
            optimizer=functools.partial(torch.optim.SGD, lr=1.0),
            **kwargs,
        )
        self.module = network
        self.evaluating = {name for name, part in network().named_modules() if not part.training}
        if self.prox_mu and not network().automatic_optimization:
            raise ValueError(
                "from_lightning: prox_mu is added to a loss, which a module with manual "
                "optimization has not"
            )
        if not float(self.client_epochs).is_integer() or not float(self.server_epochs).is_integer():
            raise ValueError(
                "from_lightning: client_epochs and server_epochs are whole numbers of epochs"
            )

    def configure_model(self) -> None:
        """Take the module as the network."""
        self.network = self.module()
        freeze(self.network, ())

    def check_data(self, data: FederatedDataModule) -> None:
        """Data loaders fit any module."""
        if not isinstance(data, LoaderData):
            super().check_data(data)

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Fits the module to the client's loader,
        or to batches ``(x, y)`` of its labelled images.
        """
        loaders, attack = self.trainer.datamodule, self.trainer.attack
        if isinstance(loaders, LoaderData):
            if attack is not None and not attack.falsifies:
                raise ValueError(
                    f"trainer.attack: {type(attack).__name__} changes stored samples; loaders "
                    "have none"
                )
            return self.fit(data, loaders.clients[data.party], self.client_epochs)
        work = super().on_client_start(data)
        return (
            self.fit(data, Passes(work), self.client_epochs, work.num_samples)
            if work.num_steps
            else work
        )

    def on_server_start(self, data: LocalData) -> LocalWork:
        """Fits the module to the server's loader, if it has one."""
        server = getattr(self.trainer.datamodule, "server", None)
        return (
            LocalWork(0, 0, lambda step: {})
            if server is None
            else self.fit(data, server, self.server_epochs)
        )

    def client_step(self, batch: Any, batch_idx: int) -> Any:
        """What a client calls in place of the module's ``training_step``: with ``prox_mu``, the
        proximal term is added.

        Args:
            batch: A batch of its loader.
            batch_idx: The number of the batch.
        """
        module: Any = self.module()
        returned = type(module).training_step(module, batch, batch_idx)
        loss = loss_of(returned, module, "training_step") if self.prox_mu else None
        if loss is None:
            return returned
        total = self.with_proximal_term(loss)
        return {**returned, "loss": total} if isinstance(returned, Mapping) else total

    def fit(
        self, data: LocalData, loader: Any, epochs: float, samples: int | None = None
    ) -> LocalWork:
        """Local work that Lightning's Trainer does.

        Args:
            data: The party, whose random numbers are used.
            loader: Its batches.
            epochs: E, a whole number.
            samples: The client's weight; the samples of its loader if left out.
        """
        is_server, module = data.party == sampling.SERVER, self.module()
        count = samples_of(loader, f"client {data.party}") if samples is None else samples
        steps = int(epochs) * len(loader)

        def train(num_steps: int, batch_ended: Callable[[int], None]) -> None:
            reporter = Reporter(1.0 if is_server else self.trainer.client_lr, batch_ended)
            key = sampling.derive_key(data.seed, "loader", data.round, data.party)
            self.train()
            for name, part in module.named_modules():
                part.training = name not in self.evaluating
            with _seeded(key, loader), _quiet():
                if not is_server:
                    vars(module)["training_step"] = self.client_step
                try:
                    passes = (
                        int(epochs) if num_steps == steps else 1
                    )  # one step alone: fast_dev_run
                    trainer = self.new_trainer(
                        [reporter], max_epochs=passes, limit_train_batches=num_steps
                    )
                    trainer.fit(module, loader)
                finally:
                    vars(module).pop("training_step", None)
            self.to(self.trainer.fabric.device)  # on a GPU, Lightning leaves the module on the CPU
            prefix = "server" if is_server else "client"
            logged = {**trainer.callback_metrics, f"{prefix}/loss": reporter.mean_loss()}
            for name, value in logged.items():
                if value is not None:
                    own_name = (
                        f"server/{name}" if is_server and not name.startswith("server/") else name
                    )
                    self.log(own_name, value.double(), batch_size=count)

        return LocalWork(count if steps else 0, steps, lambda step: {}, train=train)

    def new_trainer(self, callbacks: list[Callback], **arguments: Any) -> Trainer:
        """Lightning's Trainer on the device of this rank, which writes and prints nothing.

        Args:
            callbacks: Its callbacks.
            arguments: Further arguments.
        """
        device = self.trainer.fabric.device
        return Trainer(
            accelerator=device.type,
            devices=[device.index] if device.index else 1,
            precision=self.trainer.precision,
            gradient_clip_val=self.gradient_clip_norm,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=arguments.pop("limit_val_batches", 0),
            inference_mode=False,
            plugins=[LightningEnvironment()],
            **arguments,
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Run the module's ``validation_step`` over all batches, on the first rank."""
        self._evaluate("validate", batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Run the module's ``test_step`` over all batches, on the first rank."""
        self._evaluate("test", batch, batch_idx)

    def _evaluate(self, stage: Literal["validate", "test"], batch: Any, batch_idx: int) -> None:
        step = "validation_step" if stage == "validate" else "test_step"
        if batch_idx or self.trainer.global_rank or not is_overridden(step, self.module()):
            return
        data = self.trainer.datamodule
        loaders = batch
        if not isinstance(
            data, LoaderData
        ):  # Lightning would take a list of batches for a list of loaders
            loaders = DataLoader(
                cast(Any, list(data.evaluation_batches(stage, self.trainer.dtype))), batch_size=None
            )
        with isolate_rng(), _quiet():
            trainer = self.new_trainer([], limit_val_batches=None)
            (trainer.validate if stage == "validate" else trainer.test)(
                self.module(), loaders, verbose=False
            )
        self.to(self.trainer.fabric.device)
        for name, value in trainer.callback_metrics.items():
            self.log(name, value.double())


class LightningFixMatch(LightningFedAvg, FixMatch):
    """FixMatch at clients with loaders of ``(x_weak, x_strong)``.

    Made by :meth:`FedAvg.from_lightning`.
    """

    def client_step(self, batch: Any, batch_idx: int) -> Any:
        """FixMatch's loss of the two views."""
        return self.training_step({"x_weak": batch[0], "x_strong": batch[1]}, batch_idx)


_METHODS = {FedAvg: LightningFedAvg, FixMatch: LightningFixMatch}


def federation_of(
    method: type[FedAvg],
    module: LightningModule,
    clients: Any,
    server: Any,
    evaluated: Mapping[str, Any],
    kwargs: Any,
) -> tuple[FedAvg, FederatedDataModule]:
    """Model and data of :meth:`FedAvg.from_lightning`, which documents the arguments."""
    if method not in _METHODS:
        raise ValueError(
            f"{method.__name__}.from_lightning: only FedAvg and FixMatch train a LightningModule"
        )
    if not isinstance(module, LightningModule) or isinstance(module, FederatedAlgorithm):
        kind = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise ValueError(
            f"from_lightning: {kind} is no LightningModule that is built, with a training_step"
        )
    if taken := sorted(_OF_THE_MODULE & kwargs.keys()):
        raise ValueError(
            f"from_lightning: {taken[0]} is what the module itself decides: leave it out"
        )
    is_data = isinstance(clients, FederatedDataModule)
    if (method is FixMatch) != (server is not None) or (method is FixMatch and is_data):
        needs = (
            "clients=[loaders of (x_weak, x_strong)], server=loader"
            if method is FixMatch
            else "no server"
        )
        raise ValueError(f"{method.__name__}.from_lightning: give {needs}")
    if given := [stage for stage, loaders in evaluated.items() if is_data and loaders is not None]:
        name = f"{'val' if given[0] == 'validate' else 'test'}_dataloaders"
        raise ValueError(
            f"from_lightning: {name} is for loaders of clients: leave it out, the data have such "
            "samples"
        )
    try:
        algorithm = _METHODS[method](lambda: module, **kwargs)
    except TypeError as error:  # of an argument that no constructor knows
        hint = "the module's configure_optimizers decides learning rates"
        raise ValueError(
            f"{method.__name__}.from_lightning: {str(error).rpartition('() ')[2]}; {hint}"
        ) from error
    return algorithm, clients if is_data else LoaderData(clients, server, evaluated)


class Passes:
    """Batches ``(x, y)`` of local work; every pass has those of the next epoch.

    Args:
        work: Whole epochs on labelled images.
    """

    def __init__(self, work: LocalWork) -> None:
        self._batches = iter(work)
        self._steps = work.epoch_steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return (tuple(batch.values()) for batch in islice(self._batches, self._steps))


class Reporter(Callback):
    """Applies the rounds' schedule to the optimizers of a fit, and reports its steps and losses.

    Args:
        factor: The schedule's factor of the learning rates in this round.
        batch_ended: Called with the number of each step.
    """

    def __init__(self, factor: float, batch_ended: Callable[[int], None]) -> None:
        self._factor = factor
        self._batch_ended = batch_ended
        self._losses: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Multiply the learning rates by the factor."""
        if self._factor != 1 and trainer.lr_scheduler_configs:
            raise ValueError(
                "from_lightning: schedule cannot be combined with the schedulers of "
                "configure_optimizers"
            )
        for group in (
            group for optimizer in trainer.optimizers for group in optimizer.param_groups
        ):
            group["lr"] *= self._factor

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report a step."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._losses += [loss.detach()] if isinstance(loss, Tensor) else []
        self._batch_ended(trainer.fit_loop.total_batch_idx)

    def mean_loss(self) -> Tensor | None:
        """The mean of the losses that the steps returned; None if there are none."""
        return torch.stack(self._losses).double().mean() if self._losses else None


def samples_of(loader: Any, name: str) -> int:
    """The number of samples that an epoch of a loader draws.

    Args:
        loader: The loader.
        name: What a message calls it.

    Raises:
        ValueError: It has no length, or no batch.
    """
    try:
        batches = len(loader)
        count = _drawn(loader, batches)
    except (AttributeError, TypeError):
        count, batches = 0, 0
    if not batches and isinstance(getattr(loader, "dataset", None), IterableDataset):
        raise ValueError(
            f"from_lightning: {name} reads an IterableDataset, whose samples cannot be counted: "
            "give it __len__, or the loader a data set with indices, such as list(dataset)"
        )
    if not batches:
        raise ValueError(
            f"from_lightning: {name} is a {type(loader).__name__} without a length or without a "
            "batch: give a DataLoader of a data set that has a length and a batch or more"
        )
    return count


def _drawn(loader: Any, batches: int) -> int:
    """The samples in the batches of an epoch; other samples of the data set do not count."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if batch_sampler is None or type(batch_sampler) is BatchSampler:
        streams = isinstance(loader.dataset, IterableDataset)
        source: Any = loader.dataset if streams else (batch_sampler or loader).sampler
        drawn = len(source)
        return drawn if batch_sampler is None else min(drawn, batches * batch_sampler.batch_size)
    with isolate_rng():
        return sum(map(len, islice(batch_sampler, batches)))


@contextmanager
def _seeded(key: int, loader: Any) -> Iterator[None]:
    """Seed Python's and NumPy's random numbers and a loader's own generator.

    Torch's are seeded for each party.
    """
    with isolate_rng():
        random.seed(key)
        np.random.seed(key % 2**32)
        for generator in (
            getattr(owner, "generator", None)
            for owner in (loader, getattr(loader, "sampler", None))
        ):
            if generator is not None:
                generator.manual_seed(key)
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning from describing every fit."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.pytorch")
            yield
    finally:
        log.setLevel(level)
