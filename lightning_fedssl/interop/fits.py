"""The part of a method that lets Lightning's own ``Trainer`` fit a LightningModule to each party.

The batches may have any structure, the task may be any, and all hooks are called as Lightning calls
them. Each fit takes about 30 milliseconds more than the steps themselves.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.compile import from_compiled
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.datasets import shortened
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State, Sums
from lightning_fedssl.functional.dictionaries import add_prefix, clone_state, select
from lightning_fedssl.functional.frozen import freeze, personal_names
from lightning_fedssl.functional.returned import loss_of
from lightning_fedssl.interop.loaders import LoaderData, Loaders, samples_of, seeded
from lightning_fedssl.interop.run_logger import RunLogger, quiet
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.models import NetworkFactory
from lightning_fedssl.models.network import accept_single_values
from lightning_fedssl.state import ClientUpdate, load_state
from lightning_fedssl.storage.checkpoint_file import is_plain
from lightning_fedssl.storage.hyperparameters import require

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
    "task",
}
"""Arguments of a method that a LightningModule decides itself."""

_MOST = 2**53
"""The largest number that is counted exactly."""


class FitsLightningModule(FederatedAlgorithm):
    """A method whose clients and server fit a LightningModule; combined with a method's class.

    A client calls ``training_step`` with labelled batches, ``unlabeled_training_step`` with
    unlabelled ones, and trains on the sum where it has loaders of both. The module's
    ``current_epoch`` and ``global_step`` continue across rounds.

    Args:
        network: Returns the module.
        kwargs: The arguments of the method.

    Raises:
        ValueError: Names an argument that the module decides, or that is not a number of epochs.
    """

    def __init__(self, network: Callable[[], LightningModule], **kwargs: Any) -> None:
        for key in sorted(_OF_THE_MODULE & kwargs.keys()):
            raise ValueError(f"from_lightning: {key} is what the module itself decides")
        super().__init__(network=cast(NetworkFactory, network), **kwargs)
        for key in ("client_epochs", "server_epochs"):
            epochs = getattr(self, key)
            require(float(epochs).is_integer(), key, epochs, "give a whole number of epochs")
        self.network: Any = network()
        freeze(self.network, ())
        self.personal = personal_names(self.network, self.personal_patterns)
        self.labeled_step = self.network.training_step
        self.modes = {name: part.training for name, part in self.network.named_modules()}

    @property
    def lightning_module(self) -> LightningModule:
        """The module, of the user's own class."""
        module: LightningModule = self.network
        return module

    def check_data(self, data: FederatedDataModule) -> None:
        """Loaders fit any module."""

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Fits the module to the client's loaders."""
        return self.fit(data, self.trainer.datamodule.loaders(data.party), self.client_epochs)

    def on_server_start(self, data: LocalData) -> LocalWork:
        """Fits the module to the server's loader, if it has one."""
        return self.fit(data, self.trainer.datamodule.loaders(data.party), self.server_epochs)

    def client_loss(self, loss: Tensor) -> Tensor:
        """The loss of a client's step, to which a method may add a term."""
        return loss

    def fit(self, data: LocalData, loaders: Loaders, epochs: float) -> LocalWork:
        """Local work that Lightning's Trainer does.

        Args:
            data: The party, whose random numbers are used.
            loaders: Its loaders by kind, none for no work; shorter ones are repeated until the
                longest ends.
            epochs: E, a whole number.
        """
        count = samples_of(loaders)
        steps = int(epochs) * max(map(len, loaders.values()), default=0)

        def train(num_steps: int, batch_ended: Callable[[int], object] | None) -> None:
            fit = Fit(self, data.party, list(loaders), int(epochs), steps, batch_ended)
            key = sampling.derive_key(data.seed, "loader", data.round, data.party)
            batches = loaders if len(loaders) > 1 else next(iter(loaders.values()))
            with seeded(key, loaders), self._prepared(fit.training_step), fit.naming_errors():
                trainer = self.new_trainer(
                    callbacks=[fit], max_epochs=int(epochs), limit_val_batches=0
                )
                trainer.fit(self.network, batches)
            self.to(self.trainer.fabric.device)  # on a GPU, Lightning leaves the module on the CPU
            for name, value in fit.scalars(trainer).items():
                self.log(name, value, batch_size=count)

        return LocalWork(count if steps else 0, steps, lambda step: {}, train=train)

    @contextmanager
    def _prepared(self, training_step: Callable[[Any, int], Any]) -> Iterator[None]:
        """The module in its own modes, with another step and batch norm for single samples."""
        for name, part in self.network.named_modules():
            part.training = self.modes[name]
        handles = accept_single_values(self.network)
        try:
            with _quiet(), _replaced(self.network, training_step=training_step):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def new_trainer(self, **arguments: Any) -> Trainer:
        """Lightning's Trainer on the device of this rank, which writes and prints nothing.

        Args:
            arguments: Further arguments.
        """
        device = self.trainer.fabric.device
        logger = self.trainer.logger
        return Trainer(
            accelerator=device.type,
            devices=[device.index] if device.index else 1,
            precision=self.trainer.precision,
            gradient_clip_val=self.gradient_clip_norm,
            fast_dev_run=self.trainer.fast_dev_run,
            logger=RunLogger(logger) if logger else False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            inference_mode=False,
            plugins=[LightningEnvironment()],
            **arguments,
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Run the module's step of a stage over all batches, on the first rank.

        Args:
            batch: ``validate`` or ``test``, and the loaders.
            batch_idx: 0.
        """
        stage, loaders = batch
        if self.trainer.global_rank:
            return
        epochs = int(self.client_epochs) * self.current_round.index
        with isolate_rng(), _quiet(), _replaced(self.network):
            trainer = self.new_trainer(callbacks=[Clock(epochs)])
            getattr(trainer, stage)(self.network, loaders, verbose=False)
        self.to(self.trainer.fabric.device)
        for name, value in trainer.callback_metrics.items():
            self.log(name, value.double())

    test_step = validation_step

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write the module's own names and hyper-parameters, with which its class loads it."""
        load_state(self, checkpoint["state_dict"])
        plain = {name: value for name, value in self.network.hparams.items() if is_plain(value)}
        checkpoint |= {"state_dict": self.network.state_dict(), "hyper_parameters": plain}
        self.network.on_save_checkpoint(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read what :meth:`on_save_checkpoint` wrote."""
        self.network.on_load_checkpoint(checkpoint)
        checkpoint["state_dict"] = add_prefix("network.", checkpoint["state_dict"])


class _Counting:
    """Lightning's Trainer as a module sees it, which has trained before.

    Args:
        trainer: The trainer of one fit.
        epochs: Epochs before it.
        steps: Steps before it.
    """

    def __init__(self, trainer: Trainer, epochs: int, steps: int) -> None:
        vars(self).update(_trainer=trainer, _epochs=epochs, _steps=steps, _last=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_trainer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._trainer, name, value)

    @property
    def current_epoch(self) -> int:
        return int(self._trainer.current_epoch) + int(self._epochs)

    @property
    def max_epochs(self) -> int | None:
        """Those of the run, once a fit has begun: before, optimizers are made for the fit."""
        return self._trainer.max_epochs if self._last is None else int(self._last)

    def begin(self, epochs: int) -> None:
        """Show the epochs of the whole run from now on."""
        vars(self)["_last"] = epochs

    @property
    def global_step(self) -> int:
        return int(self._trainer.global_step) + int(self._steps)


class Clock(Callback):
    """Lets ``current_epoch`` and ``global_step`` of a module continue across rounds.

    Args:
        epochs: Epochs of earlier rounds.
        steps: Steps of earlier rounds.
    """

    def __init__(self, epochs: int, steps: int = 0) -> None:
        self.before = epochs, steps

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Show the module a trainer that has trained before.

        Raises:
            ValueError: Names a callback of the module that needs one fit of all epochs.
        """
        module.trainer = cast(Trainer, _Counting(trainer, *self.before))
        callbacks: list[Any] = cast(Any, trainer).callbacks
        if any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks):
            raise ValueError(
                "configure_callbacks gives StochasticWeightAveraging, which averages the weights "
                "of one long fit: leave it out, the server averages those of the clients; keep a "
                "moving average in a torch.optim.swa_utils.AveragedModel of the module"
            )


class Fit(Clock):
    """What happens in one fit besides Lightning's own: rates, losses, and messages.

    Args:
        method: The method.
        party: Whose fit it is.
        kinds: The kinds of its batches.
        epochs: The epochs of a fit.
        steps: The steps of a fit.
        batch_ended: Called with the number of each step, if somebody listens.
    """

    def __init__(
        self,
        method: FitsLightningModule,
        party: int,
        kinds: list[str],
        epochs: int,
        steps: int,
        batch_ended: Callable[[int], object] | None,
    ) -> None:
        rounds = method.current_round.index - 1
        super().__init__(epochs * rounds, steps * rounds)
        self.all_epochs = epochs * method.trainer.max_rounds
        self.method = method
        self.kinds = kinds
        self.batch_ended = batch_ended
        self.server = party == sampling.SERVER
        self.name = "server" if self.server else f"clients[{party}]"
        self.batch: Any = None
        self.losses: list[Tensor] = []
        self.rates: list[float] = []
        self.on_sigterm = signal.getsignal(signal.SIGTERM)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """What Lightning calls in place of the module's own: the sum of the losses of all kinds."""
        method = self.method
        self.batch = batch
        outputs = dict[str, Any]()
        losses = []
        for kind in self.kinds:
            of_kind = batch if len(self.kinds) == 1 else batch[kind]
            if kind == "labeled":
                returned = method.labeled_step(of_kind, batch_idx)
            else:
                returned = method.network.unlabeled_training_step(of_kind, batch_idx)
            part = loss_of(returned, method.network, f"the step of {kind} batches")
            outputs |= returned if isinstance(returned, Mapping) else {}
            losses += [] if part is None else [part]
        if not losses:
            return None
        loss = torch.stack(losses).sum()
        loss = loss if self.server else method.client_loss(loss)
        self.losses.append(loss.detach())
        return {**outputs, "loss": loss}

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Multiply the learning rates by the schedule's factor of the round.

        Leave SIGTERM to the run: Lightning's handler would end the fit, and with it the round.
        """
        cast(_Counting, module.trainer).begin(self.all_epochs)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.on_sigterm)
        now = self.method.current_round
        factor = self.method.schedule.checked_factor(now.index, now.max_rounds)
        if factor != 1 and trainer.lr_scheduler_configs:
            raise ValueError("give schedule, or the schedulers of configure_optimizers, not both")
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= factor
                self.rates.append(float(group["lr"]))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Report a step."""
        self.batch = None
        if self.batch_ended:
            self.batch_ended(trainer.fit_loop.total_batch_idx)

    def scalars(self, trainer: Trainer) -> dict[str, float | Tensor]:
        """What the module has logged, the server's after ``server/``; the loss and the rate."""
        prefix = "server/" if self.server else ""
        scalars: dict[str, float | Tensor] = (
            {"lr": self.rates[0]} if self.rates and not prefix else {}
        )
        scalars |= {
            prefix + name: value.double() for name, value in trainer.callback_metrics.items()
        }
        if self.losses:
            loss = torch.stack(self.losses).mean(dtype=torch.float64)
            scalars[prefix + "loss" if self.server else "client/loss"] = loss
        return scalars

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Name the party, and the shapes of its batch, in an error.

        Raises:
            ValueError: For any error.
        """
        try:
            yield
        except Exception as error:
            shapes = []
            apply_to_collection(self.batch, Tensor, lambda t: shapes.append(tuple(t.shape)))
            place = f", a batch of shapes {shapes}" if shapes else ""
            hint = ""
            if "is not available" in str(error):
                hint = "; a client has no validation: monitor what training_step logs"
            raise ValueError(
                f"{self.name}{place}: {type(error).__name__}: {error}{hint}"
            ) from error


class SendsCounters(FederatedAlgorithm):
    """The part of a method that averages whole-number buffers, such as counters of steps: they have
    no mean, and the largest of the clients' is everyone's.

    Clients send them beside their weights, so rules that combine updates do not see them and refuse
    the method.
    """

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        """Send the counters, too."""
        update = super().on_client_end(update)
        counters = clone_state(select(dict(self.named_buffers()), self._counters()))
        return replace(update, payload={**update.payload, **counters})

    def payload_limits(self, update: ClientUpdate) -> Mapping[str, tuple[Any, Any]]:
        """A counter of 64 bits stays within what is counted exactly, so it never overflows.

        Args:
            update: The update.
        """
        limits = dict(super().payload_limits(update))
        for name, t in update.payload.items():
            if t.dtype == torch.int64:
                limits[name] = (-_MOST, _MOST)
        return limits

    def _counters(self) -> list[str]:
        return [f"network.{name}" for name in counters_of(cast(Any, self).network)]

    def accumulate(self, updates: Iterable[ClientUpdate]) -> Sums:
        """Sum the updates; of counters the largest remain."""
        largest: State = {}
        names = self._counters()

        def counted() -> Iterator[ClientUpdate]:
            for update in updates:
                for name in names:
                    t = update.payload[name]
                    largest[name] = torch.maximum(largest.get(name, t), t)
                yield update

        sums = super().accumulate(counted())
        self.server.update(largest)
        return sums


def counters_of(module: nn.Module) -> list[str]:
    """The names of a module's buffers of whole numbers that belong to its state, but for the counts
    of batch norms that do not use them: those with a momentum.
    """
    names, state_names = [], module.state_dict().keys()
    for place, part in module.named_modules():
        unused = isinstance(part, _BatchNorm) and part.momentum is not None
        for name, t in part.named_buffers(place, recurse=False):
            if not t.is_floating_point() and not unused and name in state_names:
                names.append(name)
    return names


def federation(
    made: type[FitsLightningModule],
    counting: type[SendsCounters],
    module: Any,
    clients: Any,
    server: Any,
    evaluated: Mapping[str, Any],
    kwargs: Mapping[str, Any],
) -> tuple[Any, LoaderData]:
    """Model and data of ``from_lightning``.

    Args:
        made: The class of the method.
        counting: That for a module with buffers of whole numbers.
        module: The module, which may be compiled.
        clients: A sequence of loaders.
        server: The server's loader, if it has one.
        evaluated: Loaders for ``validate`` and ``test``, or None.
        kwargs: The arguments of the method.

    Raises:
        ValueError: Names the argument and what to give instead.
    """
    module = from_compiled(module) if hasattr(module, "_orig_mod") else module
    if not isinstance(module, LightningModule) or isinstance(module, FederatedAlgorithm):
        raise ValueError(
            f"from_lightning: {shortened(module)} is not a LightningModule that is built, with a "
            "training_step"
        )
    if server is not None and not hasattr(module, "unlabeled_training_step"):
        raise ValueError(
            "from_lightning: with labels at the server, clients call unlabeled_training_step("
            f"batch, batch_idx): define it in {type(module).__name__}"
        )
    _set_up(module, [stage for stage, loaders in evaluated.items() if loaders is not None])
    method: type[Any] = counting if counters_of(module) else made
    return method(lambda: module, **kwargs), LoaderData(clients, server, evaluated)


def _set_up(module: LightningModule, stages: list[str]) -> None:
    """Call the hooks that may build layers: once, before names and weights are taken.

    Raises:
        ValueError: If a hook fails, or the size of a layer is not known yet.
    """
    hook = "setup"
    try:
        with _quiet():
            module.trainer = Trainer(accelerator="cpu", devices=1, logger=False, barebones=True)
            for stage in ("fit", *stages):
                module.setup(stage)
            hook = "configure_model"
            module.configure_model()
    except Exception as error:
        raise ValueError(
            f"from_lightning: {type(module).__name__}.{hook} fails when it is called once before "
            f"the federation: {type(error).__name__}: {error}; build the module in __init__"
        ) from error
    finally:
        module.trainer = None
    for name, weight in module.named_parameters():
        if isinstance(weight, UninitializedParameter):
            raise ValueError(
                f"from_lightning: the size of {name} is not known yet: call the module with a "
                "batch of one sample or more before, or give the layer its number of inputs"
            )


def _done(stage: str = "") -> None:
    """In place of ``setup`` and ``configure_model``, which have been called."""


@contextmanager
def _replaced(module: LightningModule, **functions: Any) -> Iterator[None]:
    """Inside, the module has other functions, and does not build its layers anew."""
    functions |= {"setup": _done, "configure_model": _done}
    vars(module).update(functions)
    try:
        yield
    finally:
        for name in functions:
            del vars(module)[name]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning from describing every fit."""
    with quiet("lightning.pytorch"):
        warnings.simplefilter("ignore", PossibleUserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"lightning\.pytorch")
        yield
