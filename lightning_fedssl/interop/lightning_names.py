"""Lightning's names: what a federated run calls otherwise, and what Lightning's callbacks read."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import RunningStage

from lightning_fedssl.callbacks.checkpoint import FederatedCheckpoint
from lightning_fedssl.run import Run

if TYPE_CHECKING:
    from lightning.fabric.strategies.strategy import Strategy
    from lightning.pytorch import LightningModule
    from torch import Tensor
    from torch.optim import Optimizer

WRITERS = (Checkpoint, FederatedCheckpoint)
"""Callbacks that write checkpoints."""

_EPOCHS = (
    "give the number of rounds as trainer.max_rounds, and the work of a client in a round as "
    "model.client_epochs, or client_steps"
)
_BATCHES = "use trainer.fast_dev_run for a test, or less data: data.num_clients, data.num_labels"
_WHOLE = (
    "an evaluation uses all images; trainer.check_val_every_n_rounds says how often there is one"
)
_NO_LOADERS = "images are held in memory and augmented in batches, so there are no workers"

OTHER_NAMES = {
    "tf32": "give precision: 32-full for products with all bits",
    "quarantine": "give updates: [{class_path: Quarantine, init_args: {factor: 10}}], or [] for "
    "null",
    "aggregator": "give updates, a list of rules such as [Quarantine, Median]",
    "attack": "give updates, a list of rules such as [SignFlip, Quarantine]",
    "privacy": "give updates: [{class_path: CentralDP, init_args: {...}}]",
    "server_momentum": "give aggregation_optimizer: {class_path: torch.optim.SGD, init_args: "
    "{lr: 1, momentum: 0.5}}, or null for 0",
    "max_epochs": _EPOCHS,
    "epochs": _EPOCHS,
    "min_epochs": _EPOCHS,
    "max_steps": _EPOCHS,
    "max_time": "add Lightning's callback: --trainer.callbacks+=Timer --trainer.callbacks.duration "
    "00:01:30:00",
    "check_val_every_n_epoch": "give check_val_every_n_rounds",
    "val_check_interval": "give check_val_every_n_rounds",
    "num_sanity_val_steps": "metrics and monitors are checked before the first round",
    "gradient_clip_val": "give model.gradient_clip_norm",
    "gradient_clip_algorithm": "model.gradient_clip_norm clips by the norm",
    "accumulate_grad_batches": "give larger batches: data.client_batch_size",
    "limit_train_batches": _BATCHES,
    "overfit_batches": _BATCHES,
    "limit_val_batches": _WHOLE,
    "limit_test_batches": _WHOLE,
    "limit_predict_batches": _WHOLE,
    "log_every_n_steps": "every round is logged once; report.html has the steps of each client",
    "num_nodes": "torchrun starts ranks on several nodes and tells the trainer (docs/scaling.md)",
    "use_distributed_sampler": "each rank trains its share of a round's clients",
    "sync_batchnorm": "clients do not see each other's batches; network norms: group, static_batch",
    "profiler": "add the callback PhaseProfiler: --trainer.callbacks+=PhaseProfiler "
    "--trainer.callbacks.profiler SimpleProfiler",
    "detect_anomaly": "call torch.autograd.set_detect_anomaly(True) before fit; a round that "
    "diverges ends the run with an error",
    "benchmark": "set torch.backends.cudnn.benchmark = True before fit",
    "inference_mode": "an evaluation keeps no gradients",
    "enable_checkpointing": "fast_dev_run and logger decide what is written; FederatedCheckpoint "
    "says how often",
    "enable_model_summary": "print(model.network) shows the layers",
    "barebones": "give logger: false and enable_progress_bar: false",
    "plugins": "give accelerator, strategy and precision",
    "reload_dataloaders_every_n_epochs": "a DataSource of your own gives the data",
    "num_workers": _NO_LOADERS,
    "pin_memory": _NO_LOADERS,
    "batch_size": "give data.server_batch_size and data.client_batch_size",
    "lr": "give the learning rate as model.optimizer.lr",
    "learning_rate": "give the learning rate as model.optimizer.lr",
    "weight_decay": "give model.optimizer.weight_decay",
    "num_classes": "the data say how many classes there are",
}
"""Names that are none here, most of them Lightning's, and a sentence on what to use instead."""


class NamesKeys(ABCMeta):
    """Refuses arguments of a constructor that :data:`OTHER_NAMES` has."""

    def __call__(cls, *arguments: Any, **keys: Any) -> Any:
        """Make an object."""
        for key in keys.keys() & OTHER_NAMES.keys():
            raise TypeError(f"{cls.__name__} has no {key}: {OTHER_NAMES[key]}")
        return super().__call__(*arguments, **keys)


class LightningNames(Run):
    """What Lightning's callbacks read of a trainer, with a round as the epoch and as its step."""

    sanity_checking = False
    val_check_interval = 1.0
    num_val_batches = (1,)
    num_training_batches = 1
    progress_bar_callback = None
    received_sigterm = False
    lr_scheduler_configs: Sequence[Any] = ()

    def __getattr__(self, name: str) -> Any:
        if name in OTHER_NAMES:
            raise AttributeError(f"{type(self).__name__} has no {name}: {OTHER_NAMES[name]}")
        return object.__getattribute__(self, name)

    @property
    def local_rank(self) -> int:
        """The number of this rank on its node, from 0."""
        return self.fabric.local_rank

    @property
    def strategy(self) -> Strategy:
        """Fabric's strategy."""
        return self.fabric.strategy

    @property
    def current_epoch(self) -> int:
        """Rounds before this one: Lightning counts epochs from 0."""
        return max(self.round_index - 1, 0)

    @property
    def global_step(self) -> int:
        """The round."""
        return self.round_index

    @property
    def max_epochs(self) -> int:
        """The length of the run in rounds."""
        return self.max_rounds

    estimated_stepping_batches = max_epochs

    @property
    def check_val_every_n_epoch(self) -> int:
        """Lightning's name for ``check_val_every_n_rounds``."""
        return self.check_val_every_n_rounds

    @property
    def lightning_module(self) -> LightningModule:
        """The user's module where the algorithm trains one, else the algorithm."""
        return self.algorithm.lightning_module

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those of the clients' and of the server's steps."""
        return [self.client_optimizer, self.server_optimizer]

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The last value of every scalar, by name."""
        return self.callback_metrics

    @property
    def checkpoint_callbacks(self) -> list[Callback]:
        """The callbacks that write checkpoints."""
        return [callback for callback in self.callbacks if isinstance(callback, WRITERS)]

    @property
    def checkpoint_callback(self) -> Callback | None:
        """The first callback that writes checkpoints."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def training(self) -> bool:
        """Whether the command is ``fit``."""
        return self.state.stage == RunningStage.TRAINING

    @property
    def validating(self) -> bool:
        """Whether the command is ``validate``."""
        return self.state.stage == RunningStage.VALIDATING

    @property
    def testing(self) -> bool:
        """Whether the command is ``test``."""
        return self.state.stage == RunningStage.TESTING
