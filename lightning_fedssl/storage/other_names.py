"""Names that users of Lightning and of other programs give, and what they are here."""

from __future__ import annotations

import inspect
import re
from abc import ABCMeta
from typing import Any

_EPOCHS = (
    "give the number of rounds as trainer.max_rounds, and the work of a client in a round as "
    "model.client_epochs, or client_steps"
)
_BATCHES = "use trainer.fast_dev_run for a test, or less data: data.num_clients, data.num_labels"
_WHOLE = (
    "an evaluation uses all images; trainer.check_val_every_n_rounds says how often there is one"
)
_LOADERS = (
    "datamodule.local_data(client, round) has a client's batches, evaluation_batches the others"
)
_FABRIC = "trainer.fabric has it"
_NO_LOADERS = "images are held in memory and augmented in batches, so there are no workers"
_AVERAGE = (
    "model.aggregation_optimizer: torch.optim.SGD with lr 0.1 moves the server's weights a tenth "
    "of the way to each round's mean, which makes them a moving average"
)

OTHER_NAMES = {
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
    "num_test_batches": _WHOLE,
    "num_predict_batches": _WHOLE,
    "num_sanity_val_batches": _WHOLE,
    "enable_validation": _WHOLE,
    "evaluating": "trainer.validating and trainer.testing say which evaluation runs",
    "log_every_n_steps": "every round is logged once; report.html has the steps of each client",
    "min_steps": _EPOCHS,
    "early_stopping_callback": "it is one of trainer.callbacks",
    "early_stopping_callbacks": "they are in trainer.callbacks",
    "train_dataloader": _LOADERS,
    "train_dataloaders": "FedAvg.from_lightning(module, clients) takes one a client",
    "val_dataloaders": _LOADERS,
    "test_dataloaders": _LOADERS,
    "predict_dataloaders": _LOADERS,
    "progress_bar_metrics": "trainer.callback_metrics has the last value of every scalar",
    "is_last_batch": "a step counts in its client's epochs; on_client_batch_end has its number",
    "fit_loop": "a callback's on_round_start and on_round_end see the loop",
    "accelerator": _FABRIC,
    "device_ids": _FABRIC,
    "node_rank": _FABRIC,
    "init_module": _FABRIC,
    "precision_plugin": _FABRIC,
    "scaler": _FABRIC,
    "gpus": "give --trainer.accelerator gpu and --trainer.devices with their number",
    "csv": "give --trainer.logger CSVLogger --trainer.logger.save_dir with a folder",
    "resume": "give --ckpt_path last",
    "resume_from_checkpoint": "give --ckpt_path last, or a file",
    "ckpt": "give --ckpt_path last, or a file",
    "alpha": "give --data.partition Dirichlet --data.partition.alpha with the value",
    "iid": "give --data.partition Iid",
    "noniid": "give --data.partition Dirichlet --data.partition.alpha 0.3",
    "fraction_fit": "give --trainer.clients_per_round with a number of clients",
    "val_split": "give --data.validation with a share or a number",
    "dp": "give --trainer.updates [CentralDP], with options in a file (docs/privacy.md)",
    "loss": "give --data.task Classification --data.task.criterion with a class of torch.nn, and "
    "--data.task.criterion.reduction none",
    "label_smoothing": "give --data.task Classification --data.task.label_smoothing",
    "class_weights": "give --data.task Classification --data.task.class_weights [1,2], a number "
    "for each class",
    "mu": "give --model.prox_mu",
    "FedProx": "FedAvg has it: --model FedAvg --model.prox_mu 0.01",
    "FedAdam": "give --model.aggregation_optimizer FedOpt, or a class of torch.optim",
    "resnet50": "name a network of timm: --data.backbone TimmBackbone --data.backbone.name with it",
    "quiet": "give --trainer.enable_progress_bar false",
    "optimizer": "give --model.optimizer with a class of torch.optim",
    "lr_scheduler": "give --model.schedule, such as Cosine, which lasts the whole run",
    "EMAWeightAveraging": _AVERAGE,
    "WeightAveraging": _AVERAGE,
    "StochasticWeightAveraging": _AVERAGE,
    "num_nodes": "torchrun starts ranks on several nodes and tells the trainer (docs/scaling.md)",
    "use_distributed_sampler": "each rank trains its share of a round's clients",
    "sync_batchnorm": "clients do not see each other's batches; network norms: group, static_batch",
    "profiler": "report.html has the seconds of each phase; in Python put torch.profiler around "
    "trainer.fit",
    "detect_anomaly": "call torch.autograd.set_detect_anomaly(True) before fit; a round that "
    "diverges ends the run with an error",
    "benchmark": "set torch.backends.cudnn.benchmark = True before fit",
    "inference_mode": "an evaluation keeps no gradients",
    "enable_checkpointing": "fast_dev_run and logger decide what is written; FederatedCheckpoint "
    "says how often",
    "enable_model_summary": "print(model.network) shows the layers",
    "barebones": "give logger: false and enable_progress_bar: false",
    "model_registry": "export writes the model (docs/export.md)",
    "enable_autolog_hparams": "every logger gets the hyper-parameters",
    "weights_only": "a checkpoint is read with weights_only=True always",
    "distributed_sampler_kwargs": "each rank trains its share of a round's clients",
    "plugins": "give accelerator, strategy and precision",
    "reload_dataloaders_every_n_epochs": "a DataSource of your own gives the data",
    "num_workers": _NO_LOADERS,
    "pin_memory": _NO_LOADERS,
    "batch_size": "give data.server_batch_size and data.client_batch_size",
    "lr": "give the learning rate as model.optimizer.lr",
    "learning_rate": "give the learning rate as model.optimizer.lr",
    "weight_decay": "give model.optimizer.weight_decay",
    "class_path": "next to class_path there is init_args, which has the options",
    "seed": "give seed_everything, or seeds of compare",
    "num_classes": "the data say how many classes there are",
}
"""Names that do not exist here, most of them Lightning's, and what to use instead."""


class NamesKeys(ABCMeta):
    """Says what to give in place of an argument that a constructor does not know."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """What ``help`` shows: the arguments of the constructor."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=[*signature.parameters.values()][1:])

    def __call__(cls, *arguments: Any, **keys: Any) -> Any:
        """Make an object."""
        try:
            # Not by super(): Lightning takes a frame with a __class__ for that of a constructor.
            return type.__call__(cls, *arguments, **keys)
        except TypeError as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown is None or unknown[1] not in OTHER_NAMES or unknown[1] not in keys:
                raise  # of another constructor inside, such as an optimizer's
            name = unknown[1]
            raise TypeError(f"{cls.__name__} has no {name}: {OTHER_NAMES[name]}") from error
