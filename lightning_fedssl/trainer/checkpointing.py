"""What a checkpoint of a run contains, and how a run goes on from it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import torch

from lightning_fedssl.export import describe_model
from lightning_fedssl.export.named_value import named_values
from lightning_fedssl.state import load_optimizer_state, optimizer_state
from lightning_fedssl.storage import checkpoint_file, client_store
from lightning_fedssl.trainer.settings import differences, settings_of

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.trainer import FederatedTrainer


_log = logging.getLogger(__name__)

INSIDE = 16 * 2**20
"""Bytes of all that clients keep up to which it lies in the checkpoint itself, and beyond which in files beside it."""


def save(trainer: FederatedTrainer, path: Path, weights_only: bool = False) -> None:
    """Write a checkpoint: whatever happens meanwhile, ``path`` is the old or the new one, with its clients' files.

    Of the clients' files only those are written that the last checkpoint of that name has not got.

    Args:
        trainer: The run.
        path: The file.
        weights_only: Leave out the clients' states.

    Raises:
        OSError: If the disk refuses.
        TypeError: If a value could not be read back, naming its place.
    """
    clients, folder = trainer.algorithm.clients, client_store.files_of(path)
    files = clients.save(folder) if clients.num_bytes() > INSIDE and not weights_only else []
    checkpoint_file.save(take(trainer, files, weights_only), path)
    client_store.tidy(folder, files)


def remove(path: str | Path) -> None:
    """Remove a checkpoint and its clients' files."""
    Path(path).unlink(missing_ok=True)
    client_store.tidy(client_store.files_of(Path(path)), [])


def take(
    trainer: FederatedTrainer, client_files: Sequence[str] = (), weights_only: bool = False
) -> checkpoint_file.Checkpoint:
    """Everything a run needs to go on, as tensors and primitives.

    ``state_dict`` is the evaluated model, ``federation`` the server's and the clients' state, ``callbacks`` the
    callbacks' state and ``round`` the number of rounds done. Random streams need no entry: they are functions of the
    seed and the round. ``pytorch-lightning_version`` and ``hyper_parameters`` are what Lightning's
    ``load_from_checkpoint`` needs, ``model`` is what ``export`` needs.

    Args:
        trainer: The run.
        client_files: Names of the files that hold what the clients keep; with none it is in the checkpoint.
        weights_only: Leave out the clients' states; a run that has any can then not be resumed from the checkpoint.
    """
    algorithm, server = trainer.algorithm, trainer.algorithm.server
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "format": checkpoint_file.FORMAT,
        "settings": settings_of(trainer),
        "pytorch-lightning_version": lightning.__version__,
        "hyper_parameters": _hyper_parameters(algorithm),
        "model": describe_model(algorithm, trainer.datamodule, trainer.round_index, metrics),
        "state_dict": dict(algorithm.evaluated_model()),
        "callbacks": {c.state_key: state for c in trainer.callbacks if (state := c.state_dict())},
        "round": int(trainer.round_index),
        "epoch": int(trainer.current_epoch),
        "global_step": int(trainer.global_step),
        "algorithm": type(algorithm).__name__,
        "seed": int(trainer.seed),
        "partition": str(trainer.datamodule.split.hash),
        "optimizer": type(trainer.client_optimizer).__name__,
        "total_bytes": float(trainer.total_bytes),
        "metrics": metrics,
        "federation": {
            "parameters": dict(server.parameters),
            "buffers": dict(server.buffers),
            "momentum": dict(server.momentum),
            "version": int(server.version),
            "extra": {name: dict(state) for name, state in server.extra.items()},
            "server_optimizer": optimizer_state(trainer.server_optimizer),
            "clients": {} if client_files or weights_only else algorithm.clients.state_dict(),
            "client_files": list(client_files),
            "client_states_left_out": weights_only and len(algorithm.clients) > 0,
        },
    }


def _hyper_parameters(algorithm: FederatedAlgorithm) -> dict[str, Any]:
    """The algorithm's arguments as a configuration, from which Lightning makes the objects that they name."""
    sizes = {"num_classes": algorithm.num_classes, "in_shape": list(algorithm.in_shape or ())}
    given = {name: value for name, value in algorithm.hparams.items() if not name.startswith("_")}
    # A configuration cannot bind arguments of a function that makes an optimizer; inference needs no optimizer.
    bound = {name for name, value in given.items() if isinstance(value, partial) and not isinstance(value.func, type)}
    given = {name: value for name, value in given.items() if name == "network" or name not in bound}
    return {**named_values(given), **sizes, "_instantiator": "lightning.pytorch.cli.instantiate_module"}


def load_model(trainer: FederatedTrainer, path: Path) -> checkpoint_file.Checkpoint:
    """Load the global model and the callbacks' state, for evaluation.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, or of another algorithm or network.
    """
    loaded = checkpoint_file.load(path)
    name = type(trainer.algorithm).__name__
    if loaded["algorithm"] != name:
        raise ValueError(
            f"ckpt_path: {path} was written by {loaded['algorithm']}, but model is {name}; "
            "use the config.yaml that lies beside the checkpoint's folder"
        )
    server, state = trainer.algorithm.server, loaded["federation"]
    expected = {n: t.shape for n, t in server.model().items()}
    found = {n: t.shape for n, t in {**state["parameters"], **state["buffers"]}.items()}
    if wrong := sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n)):
        raise ValueError(
            f"ckpt_path: {path} holds another network: {wrong[0]} does not fit; "
            "use the config.yaml that lies beside the checkpoint's folder"
        )
    server.update(state["parameters"], state["buffers"])
    server.version = state["version"]
    trainer.round_index = loaded["round"]
    for callback in trainer.callbacks:
        if saved := loaded["callbacks"].get(callback.state_key):
            callback.load_state_dict(saved)
    return loaded


def check_same_data(trainer: FederatedTrainer, loaded: checkpoint_file.Checkpoint, path: Path) -> None:
    """Refuse a checkpoint of another seed or partition: it may have trained on what is held out here.

    Raises:
        ValueError: Naming the key that differs.
    """
    if loaded["seed"] != trainer.seed:
        raise ValueError(
            f"seed_everything is {trainer.seed}, but {path} is of a run with {loaded['seed']}: give that seed"
        )
    if loaded["partition"] != trainer.datamodule.split.hash:
        raise ValueError(
            f"ckpt_path: {path} was made on another partition of the data; "
            "use the data keys of the config.yaml that lies beside the checkpoint's folder"
        )


def resume(trainer: FederatedTrainer, path: Path) -> int:
    """Put everything back as it was at the end of a round.

    Returns:
        That round.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, or of another algorithm, network, seed or partition.
    """
    try:
        return _resume(trainer, path)
    except (AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"ckpt_path: {path} has an entry that cannot be read ({type(error).__name__}: {error}); it was changed or "
            "comes from an old version: use another checkpoint of the run"
        ) from error


def _resume(trainer: FederatedTrainer, path: Path) -> int:
    loaded = load_model(trainer, path)
    check_same_data(trainer, loaded, path)
    _check_settings(trainer, loaded, path)
    optimizer = type(trainer.client_optimizer).__name__
    if loaded["optimizer"] != optimizer:
        raise ValueError(
            f"ckpt_path: {path} is of a run with the optimizer {loaded['optimizer']}, but the model has {optimizer}; "
            "use the config.yaml that lies beside the checkpoint's folder"
        )
    state, server = loaded["federation"], trainer.algorithm.server
    _check_tensors(trainer, state, path)
    server.momentum, server.extra = dict(state["momentum"]), {kind: dict(s) for kind, s in state["extra"].items()}
    server.to(trainer.fabric.device)
    load_optimizer_state(trainer.server_optimizer, state["server_optimizer"])
    _load_clients(trainer, path, state)
    trainer.callback_metrics = {n: torch.tensor(v, dtype=torch.float64) for n, v in loaded["metrics"].items()}
    trainer.total_bytes = loaded.get("total_bytes", 0.0)
    return int(loaded["round"])


def _check_settings(trainer: FederatedTrainer, loaded: checkpoint_file.Checkpoint, path: Path) -> None:
    """Refuse to resume with other settings, unless they are allowed to differ."""
    changed = differences(loaded.get("settings", {}), settings_of(trainer))
    if not changed:
        return
    if trainer.allow_changed:
        _log.warning("resuming %s with other settings: %s", path, ", ".join(changed))
        return
    raise ValueError(
        f"ckpt_path: {path} is of a run with other settings: {', '.join(changed)}; use those of the checkpoint (its "
        "run folder has them in config.yaml), or resume with the new ones by --trainer.allow_changed true"
    )


def _check_tensors(trainer: FederatedTrainer, state: checkpoint_file.Checkpoint, path: Path) -> None:
    """Refuse another precision, and states whose shapes are not those of the weights that they belong to."""
    server = trainer.algorithm.server
    for name, weight in server.parameters.items():
        if state["parameters"][name].dtype != weight.dtype:
            raise ValueError(
                f"ckpt_path: {path} has weights of type {state['parameters'][name].dtype}, but trainer.precision "
                f"{trainer.precision} takes {weight.dtype}: give the precision of the checkpoint"
            )
    most = max(trainer.datamodule.num_clients, trainer.clients_per_round)
    for client in state["clients"]:
        if not 0 <= client < most:
            raise ValueError(f"ckpt_path: {path} holds the state of client {client}, but there are {most} clients")
    parts = {"the server's momentum": state["momentum"], **state["extra"]}
    parts |= {f"client {client}": kept for client, kept in state["clients"].items()}
    shapes = {name: t.shape for name, t in server.model().items()}
    for owner, tensors in parts.items():
        for name, t in tensors.items():
            shape = shapes.get(name) or shapes.get(name.partition(".")[2])
            if shape is not None and t.shape != shape:
                raise ValueError(
                    f"ckpt_path: {path}: {name} of {owner} has the shape {tuple(t.shape)} instead of {tuple(shape)}; "
                    "the file was changed: use another checkpoint of the run"
                )


def _load_clients(trainer: FederatedTrainer, path: Path, state: checkpoint_file.Checkpoint) -> None:
    if state.get("client_states_left_out", False):
        raise ValueError(
            f"ckpt_path: {path} holds the model without the clients' states (their optimizers' momentum and the like), "
            "so it can be evaluated and exported, but a run cannot be resumed from it; give --ckpt_path last, or, for "
            "runs to come, set best_client_states: true in the callback FederatedCheckpoint"
        )
    files = state.get("client_files", [])
    if not files:
        trainer.algorithm.clients.load_state_dict(state["clients"])
        return
    folder = client_store.files_of(path.resolve())
    try:
        trainer.algorithm.clients.load(folder, files)
    except ValueError as error:
        raise ValueError(
            f"ckpt_path: {path} goes with the folder {folder.name} beside it, where its clients' states are, but "
            f"{error}; keep the two together, or use another checkpoint of the run"
        ) from error
