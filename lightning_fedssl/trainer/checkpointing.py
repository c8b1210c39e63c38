"""What a checkpoint of a run contains, and how a run resumes from it."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import lightning

from lightning_fedssl import export
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.export import describe_model
from lightning_fedssl.export.description import Description, describe_data
from lightning_fedssl.export.named_value import named_values
from lightning_fedssl.state import frozen_state, is_local, load_optimizer_state, load_state, optimizer_state
from lightning_fedssl.storage import checkpoint_file, client_store
from lightning_fedssl.storage.temporary import lock_folder
from lightning_fedssl.trainer.run import Run, as_tensors
from lightning_fedssl.trainer.settings import differences, settings_of

_log = logging.getLogger(__name__)

_WRITTEN = (
    "last.ckpt", "last.clients", "best.ckpt", "best.clients", "model.safetensors", "model.json",
)  # fmt: skip
"""The files and folders that a run writes among its checkpoints."""

INSIDE = 16 * 2**20
"""The largest size in bytes of all client states for which they are stored in the checkpoint itself."""


def find(ckpt_path: str | Path | None, root: Path) -> Path | None:
    """The file of a checkpoint: a path, or ``last`` or ``best`` of the newest run below a folder; None for none.

    The log names the file of ``last`` and ``best``: the newest run need not be the one whose configuration is given.
    """
    if ckpt_path is None:
        return None
    path = checkpoint_file.find(ckpt_path, root)
    if path != Path(ckpt_path):
        _log.info("%s checkpoint of the newest run: %s", ckpt_path, path)
    return path


def save(run: Run, path: Path, weights_only: bool = False) -> None:
    """Write a checkpoint. If the process is killed meanwhile, ``path`` is either the old or the new checkpoint.

    Files of clients that the previous checkpoint of that name already has are not written again.

    Args:
        run: The run.
        path: The file.
        weights_only: Leave out the clients' states.

    Raises:
        OSError: If the file cannot be written.
        TypeError: If a value could not be read back, naming the value.
    """
    clients, folder = run.algorithm.clients, client_store.files_of(path)
    files = clients.save(folder) if clients.num_bytes() > INSIDE and not weights_only else []
    checkpoint_file.save(take(run, files, weights_only), path)
    client_store.tidy(folder, files)


def save_model(run: Run, folder: Path) -> None:
    """Write the evaluated model as ``model.safetensors`` and ``model.json``; the folder is made."""
    algorithm = run.algorithm
    load_state(algorithm, algorithm.evaluated_model())
    export.save_model(algorithm.configured_network(), _description(run), folder)


def _description(run: Run) -> Description:
    """The content of ``model.json`` for the present model."""
    status = run.status
    return describe_model(run.algorithm, run.datamodule, status.round_index, status.scalars(), status.metric_rounds)


def save_missing(run: Run) -> None:
    """Write the last checkpoint if it has an earlier round."""
    for writer in run.hooks.callbacks:
        if isinstance(writer, FederatedCheckpoint):
            writer.save_missing(run.trainer)


@contextmanager
def folder_of_one_run(run: Run) -> Iterator[None]:
    """Keep other runs out of the folder of this run's checkpoints inside the context.

    Runs share a folder if they have no logger, or the same logger of the user.

    Args:
        run: The run, before its first round.

    Raises:
        ValueError: Another run is training in the folder.
    """
    writers = [c for c in run.hooks.callbacks if isinstance(c, FederatedCheckpoint)]
    if not writers or not run.fabric.is_global_zero:
        yield
        return
    folder = writers[0].folder(run.trainer)
    descriptor = lock_folder(folder)
    if descriptor is None:
        raise ValueError(
            f"another run is training now and writes its checkpoints into {folder}, where this run would replace them: "
            "give trainer.default_root_dir another folder (or a logger with a folder of its own), or wait for its end"
        )
    try:
        yield
    finally:
        os.close(descriptor)


def set_earlier_run_aside(run: Run, ckpt_path: Path | None) -> None:
    """Move what an earlier run has left in the folder of this run's checkpoints to a folder ``earlier_N`` beside it.

    Runs share a folder if they have no logger, or the same logger of the user. A run that resumes a checkpoint of the
    folder continues the earlier run, and moves nothing. Files of other names stay.

    Args:
        run: The run, before its first round.
        ckpt_path: The checkpoint that it resumes; None if it begins anew.

    Raises:
        OSError: If a file cannot be moved.
    """
    writers = [c for c in run.hooks.callbacks if isinstance(c, FederatedCheckpoint)]
    if not writers or not run.fabric.is_global_zero:
        return
    folder = writers[0].folder(run.trainer)
    found = [path for name in _WRITTEN if (path := folder / name).exists()]
    if not found or (ckpt_path is not None and ckpt_path.resolve().parent == folder.resolve()):
        return
    kept = _new_folder(folder.parent, "earlier") / folder.name
    kept.mkdir()
    for path in found:
        path.replace(kept / path.name)
    _log.info("the checkpoints of an earlier run in %s are now in %s", folder, kept)


def _new_folder(parent: Path, name: str) -> Path:
    """Make the first folder of ``name_1``, ``name_2`` and so on that does not exist."""
    for number in count(1):
        with suppress(FileExistsError):
            (folder := parent / f"{name}_{number}").mkdir()
            return folder
    raise AssertionError("count() never ends")


def remove(path: str | Path) -> None:
    """Remove a checkpoint and its clients' files."""
    Path(path).unlink(missing_ok=True)
    client_store.tidy(client_store.files_of(Path(path)), [])


def take(run: Run, client_files: Sequence[str] = (), weights_only: bool = False) -> checkpoint_file.Checkpoint:
    """Everything that a run needs to resume, as tensors and primitives.

    ``state_dict`` is the evaluated model with its frozen layers, ``federation`` the state of server and clients,
    ``callbacks`` the state of the callbacks and ``round`` the number of finished rounds. Random numbers need no entry:
    they are functions of the seed and the round. ``pytorch-lightning_version`` and ``hyper_parameters`` are what
    Lightning's ``load_from_checkpoint`` needs, ``model`` is what ``export`` needs.

    Args:
        run: The run.
        client_files: Names of the files that hold the clients' state; without any, the checkpoint holds it.
        weights_only: Leave out the clients' states; a run that has any can then not be resumed from the checkpoint.
    """
    algorithm, server, status = run.algorithm, run.algorithm.server, run.status
    return {
        "format": checkpoint_file.FORMAT,
        "settings": settings_of(run),
        "pytorch-lightning_version": lightning.__version__,
        "hyper_parameters": _hyper_parameters(algorithm),
        "model": _description(run),
        "state_dict": {**frozen_state(algorithm), **algorithm.evaluated_model()},
        "callbacks": {c.state_key: state for c in run.hooks.callbacks if (state := c.state_dict())},
        "round": int(status.round_index),
        "epoch": max(int(status.round_index) - 1, 0),
        "global_step": int(status.round_index),
        "algorithm": type(algorithm).__name__,
        "seed": int(run.seed),
        "partition": str(run.datamodule.split.hash),
        "optimizer": type(run.client_optimizer).__name__,
        "total_bytes": float(status.total_bytes),
        "metrics": status.scalars(),
        "federation": {
            "parameters": dict(server.parameters),
            "buffers": dict(server.buffers),
            "momentum": dict(server.momentum),
            "version": int(server.version),
            "extra": {name: dict(state) for name, state in server.extra.items()},
            "server_optimizer": optimizer_state(run.server_optimizer),
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
    # The checkpoint has the weights, so the file that they started from need not exist any more.
    given = {name: value for name, value in given.items() if name not in ("init_from", "init_except")}
    return {**named_values(given), **sizes, "_instantiator": "lightning.pytorch.cli.instantiate_module"}


def load_model(run: Run, path: Path) -> checkpoint_file.Checkpoint:
    """Load the global model and the callbacks' state, for evaluation.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, or of another algorithm or network.
    """
    loaded = checkpoint_file.load(path)
    name = type(run.algorithm).__name__
    if loaded["algorithm"] != name:
        raise ValueError(
            f"ckpt_path: {path} was written by {loaded['algorithm']}, but model is {name}; "
            "use the config.yaml of the checkpoint's run folder"
        )
    server, state = run.algorithm.server, loaded["federation"]
    local = run.algorithm.local_modules  # the first version saved the teacher of MeanTeacher, which no round reads
    for kind in ("parameters", "buffers"):
        state[kind] = {name: t for name, t in state[kind].items() if not is_local(name, local)}
    expected = {n: t.shape for n, t in server.model().items()}
    found = {n: t.shape for n, t in {**state["parameters"], **state["buffers"]}.items()}
    if wrong := sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n)):
        raise ValueError(
            f"ckpt_path: {path} holds another network: {wrong[0]} does not fit; "
            "use the config.yaml of the checkpoint's run folder"
        )
    server.update(state["parameters"], state["buffers"])
    # Callbacks evaluate other models, such as group means, together with the global model of the same round.
    server.extra = {kind: dict(tensors) for kind, tensors in state.get("extra", {}).items()}
    server.to(run.fabric.device)
    frozen = frozen_state(run.algorithm)
    load_state(run.algorithm, {name: t for name, t in loaded["state_dict"].items() if name in frozen})
    server.version = state["version"]
    run.status.round_index = loaded["round"]
    run.algorithm.origin = {key: loaded[key] for key in ("seed", "partition", "model") if key in loaded}
    for callback in run.hooks.callbacks:
        if saved := loaded["callbacks"].get(callback.state_key):
            callback.load_state_dict(saved)
    return loaded


_OF_SAMPLES = ("class_names", "input", "normalization")


def origin_of(run: Run) -> dict[str, Any]:
    """The data that a run trains on, under the keys that a checkpoint has for them."""
    return {"seed": run.seed, "partition": run.datamodule.split.hash, "model": describe_data(run.datamodule)}


def check_same_samples(
    run: Run, origin: Mapping[str, Any], path: Path | None, names: Sequence[str] = _OF_SAMPLES
) -> None:
    """Refuse a model of other classes, of another kind of samples, or of samples that were normalised otherwise.

    Args:
        run: The run.
        origin: The content of the checkpoint, or what :func:`origin_of` gave when the model was trained.
        path: The checkpoint; None for a model that was trained in this process.
        names: What to compare.

    Raises:
        ValueError: Naming what differs by more than rounding; not with ``trainer.allow_changed``.
    """
    saved, now = origin.get("model", {}), describe_data(run.datamodule)
    changed = [name for name in names if name in saved and not _same(saved[name], now[name])]
    if not changed:
        return
    name = changed[0]
    found = f"{name.replace('_', ' ')} {saved[name]}, but these data have {now[name]}"
    problem = f"{path or 'the model'} was trained on data with the {found}"
    if run.allow_changed:
        _log.warning("%s", problem)
        return
    raise ValueError(f"{_key(path)}{problem}; {_remedy(path)}, or go on nevertheless by --trainer.allow_changed true")


def _key(path: Path | None) -> str:
    return "ckpt_path: " if path else ""


def _remedy(path: Path | None) -> str:
    if path is None:
        return "give the data module that it was trained with"
    return "use the data keys of the config.yaml of the checkpoint's run folder"


def _same(a: Any, b: Any) -> bool:
    """Whether two plain values are equal; floats up to rounding, because a mean depends on the machine's order."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
    return bool(a == b)


def check_same_data(run: Run, origin: Mapping[str, Any], path: Path | None) -> None:
    """Refuse a model of another seed or partition: it may have trained on what is held out here.

    Args:
        run: The run.
        origin: See :func:`check_same_samples`.
        path: See :func:`check_same_samples`.

    Raises:
        ValueError: Naming the key that differs.
    """
    who = path or "the model"
    if origin["seed"] != run.seed:
        raise ValueError(f"seed_everything is {run.seed}, but {who} is of a run with {origin['seed']}: give that seed")
    if origin["partition"] != run.datamodule.split.hash:
        raise ValueError(f"{_key(path)}{who} was made on another partition of the data; {_remedy(path)}")


def resume(run: Run, path: Path) -> int:
    """Restore a run as it was at the end of a round.

    Returns:
        That round.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, or of another algorithm, network, seed, partition or other data.
    """
    try:
        return _resume(run, path)
    except (AttributeError, IndexError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"ckpt_path: {path} has an entry that cannot be read ({type(error).__name__}: {error}); it was changed or "
            "comes from an old version: use another checkpoint of the run"
        ) from error


def _resume(run: Run, path: Path) -> int:
    loaded = load_model(run, path)
    check_same_samples(run, loaded, path, _OF_SAMPLES[:2])
    check_same_data(run, loaded, path)
    _check_settings(run, loaded, path)  # before the normalisation, which changes with the samples
    check_same_samples(run, loaded, path, _OF_SAMPLES[2:])
    optimizer = type(run.client_optimizer).__name__
    if loaded["optimizer"] != optimizer:
        raise ValueError(
            f"ckpt_path: {path} is of a run with the optimizer {loaded['optimizer']}, but the model has {optimizer}; "
            "use the config.yaml of the checkpoint's run folder"
        )
    state, server = loaded["federation"], run.algorithm.server
    _check_tensors(run, state, path)
    server.momentum = dict(state["momentum"])
    server.to(run.fabric.device)
    load_optimizer_state(run.server_optimizer, state["server_optimizer"])
    _load_clients(run, path, state)
    # The test of a run that had finished is not a test of the longer run.
    run.status.callback_metrics = as_tensors({k: v for k, v in loaded["metrics"].items() if not k.startswith("test/")})
    known = loaded.get("model", {}).get("metric_rounds", {})
    run.status.metric_rounds = {stage: number for stage, number in known.items() if stage != "test"}
    run.status.total_bytes = loaded.get("total_bytes", 0.0)
    return int(loaded["round"])


def _check_settings(run: Run, loaded: checkpoint_file.Checkpoint, path: Path) -> None:
    """Refuse to resume with other settings, unless they are allowed to differ."""
    changed = differences(loaded.get("settings", {}), settings_of(run))
    if not changed:
        return
    if run.allow_changed:
        _log.warning("resuming %s with other settings: %s", path, ", ".join(changed))
        return
    raise ValueError(
        f"ckpt_path: {path} is of a run with other settings: {', '.join(changed)}; use those of the checkpoint (its "
        "run folder has them in config.yaml), or resume with the new ones by --trainer.allow_changed true"
    )


def _check_tensors(run: Run, state: checkpoint_file.Checkpoint, path: Path) -> None:
    """Refuse another precision, and states whose shapes are not those of the weights that they belong to."""
    server = run.algorithm.server
    for name, weight in server.parameters.items():
        if state["parameters"][name].dtype != weight.dtype:
            raise ValueError(
                f"ckpt_path: {path} has weights of type {state['parameters'][name].dtype}, but trainer.precision "
                f"{run.trainer.precision} takes {weight.dtype}: give the precision of the checkpoint"
            )
    most = max(run.datamodule.num_clients, run.trainer.clients_per_round)
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


def _load_clients(run: Run, path: Path, state: checkpoint_file.Checkpoint) -> None:
    if state.get("client_states_left_out", False):
        raise ValueError(
            f"ckpt_path: {path} holds the model without the clients' states (their optimizers' momentum and the like), "
            "so it can be evaluated and exported, but a run cannot be resumed from it; give --ckpt_path last, or, for "
            "runs to come, set best_client_states: true in the callback FederatedCheckpoint"
        )
    files = state.get("client_files", [])
    if not files:
        run.algorithm.clients.load_state_dict(state["clients"])
        return
    folder = client_store.files_of(path.resolve())
    try:
        run.algorithm.clients.load(folder, files)
    except ValueError as error:
        raise ValueError(
            f"ckpt_path: {path} goes with the folder {folder.name} beside it, where the states of its clients are, but "
            f"{error}; keep the two together, or use another checkpoint of the run"
        ) from error
