"""What a checkpoint of a run contains, and how a run resumes from it."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback

from lightning_fedssl import export
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.callbacks import FederatedCheckpoint
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.export import describe_model
from lightning_fedssl.export.description import Description, describe_data
from lightning_fedssl.functional.dictionaries import (
    add_prefix,
    exclude,
    map_values,
    select,
    starting_with,
)
from lightning_fedssl.functional.optimizer_states import load_optimizer_state, optimizer_state
from lightning_fedssl.functional.schedules import Schedule
from lightning_fedssl.functional.stacking import shapes_of
from lightning_fedssl.hooks import Hooks
from lightning_fedssl.round import Round
from lightning_fedssl.run import Run
from lightning_fedssl.state import frozen_state, load_state
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.storage.files import lock_folder
from lightning_fedssl.trainer.settings import differences

_log = logging.getLogger(__name__)


def find(ckpt_path: str | Path | None, root: Path) -> Path | None:
    """The file of a checkpoint: a path, or ``last`` or ``best`` of the newest run below a folder;
    None for none.

    The log names the file of ``last`` and ``best``: their run need not be the one whose
    configuration is given.
    """
    if ckpt_path is None:
        return None
    path = checkpoint_file.find(ckpt_path, root)
    if path != Path(ckpt_path):
        _log.info("--ckpt_path %s is %s", ckpt_path, path)
    return path


def save(run: Run, path: Path, weights_only: bool = False) -> None:
    """Write a checkpoint. If the process is killed meanwhile, ``path`` is either the old or the new
    checkpoint.

    Args:
        run: The run.
        path: The file.
        weights_only: Leave out the clients' states.

    Raises:
        OSError: If the file cannot be written.
        TypeError: If a value could not be read back, naming the value.
    """
    names = None if weights_only else run.algorithm.clients.files
    checkpoint_file.save(take(run, weights_only), path, names)


def save_model(run: Run, folder: Path) -> None:
    """Write the evaluated model as ``model.safetensors`` and ``model.json``; the folder is made."""
    algorithm = run.algorithm
    load_state(algorithm, algorithm.evaluated_model())
    export.save_model(algorithm.configured_network(), _description(run), folder)


def _description(run: Run) -> Description:
    """The description of the run with its present model; see :func:`describe_model`."""
    return describe_model(
        run.algorithm,
        run.datamodule,
        run.described,
        run.round.index,
        map_values(float, run.scalars.last),
        run.scalars.rounds,
        run.settings.describe_privacy(),
    )


def save_missing(hooks: Hooks) -> None:
    """Write the last checkpoint if it has an earlier round."""
    for writer in _writers(hooks):
        writer.save_missing(hooks.trainer)


def _writers(hooks: Hooks) -> list[FederatedCheckpoint]:
    return [callback for callback in hooks.callbacks if isinstance(callback, FederatedCheckpoint)]


@contextmanager
def folder_of_one_run(run: Run) -> Iterator[None]:
    """Keep other runs out of the folder of this run's checkpoints inside the context.

    Runs share a folder if they have no logger, or the same logger of the user.

    Args:
        run: The run, before its first round.

    Raises:
        ValueError: Another run is training in the folder.
    """
    writers = _writers(run.hooks)
    if not writers or not run.fabric.is_global_zero or run.settings.fast_dev_run:
        yield
        return
    folder = writers[0].folder(run.hooks.trainer)
    resumed = run.ckpt_path
    lock = lock_folder(folder)
    if lock is None:
        raise ValueError(
            f"another run is training now and writes its checkpoints into {folder}, where this run "
            "would replace them: give trainer.default_root_dir another folder (or a logger with a "
            "folder of its own), or wait for its end"
        )
    try:
        if resumed is None or resumed.parent.resolve() != folder.resolve():
            (folder / "best.ckpt").unlink(missing_ok=True)  # of an earlier run in this folder
        yield
    finally:
        lock.release()


def states_of(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """The states of the callbacks that have one, by ``state_key``."""
    return {callback.state_key: state for callback in callbacks if (state := callback.state_dict())}


def restore(callbacks: Sequence[Callback], states: Mapping[str, Any]) -> None:
    """Give callbacks the states that :func:`states_of` took.

    Args:
        callbacks: The callbacks.
        states: Their states by ``state_key``.
    """
    for callback in callbacks:
        if saved := states.get(callback.state_key):
            callback.load_state_dict(saved)


def take(run: Run, weights_only: bool = False) -> checkpoint_file.Checkpoint:
    """Everything that a run needs to resume, as tensors and primitives.

    ``state_dict`` is the evaluated model with its frozen layers, ``federation`` the state of server
    and clients (of large ones ``states`` names a file each), ``callbacks`` the state of the
    callbacks and ``round`` the number of finished rounds. Random numbers need no entry: they are
    functions of the seed and the round.
    ``model`` is the description of the run
    (:func:`~lightning_fedssl.export.description.describe_model`), from which a checkpoint is
    loaded, exported, and compared with a run that resumes.

    Args:
        run: The run.
        weights_only: Leave out the clients' states; a run that has any can then not be resumed from
            the checkpoint, so the state of the server's optimizer is left out, too.
    """
    algorithm = run.algorithm
    left_out = weights_only and len(algorithm.clients) > 0
    server = run.algorithm.server
    checkpoint = {
        "format": checkpoint_file.FORMAT,
        "pytorch-lightning_version": lightning.__version__,
        "model": _description(run),
        "state_dict": {
            **frozen_state(algorithm),
            **server.personal,
            **algorithm.evaluated_model(),
        },
        "callbacks": states_of(run.hooks.callbacks),
        "round": run.round.index,
        "epoch": max(run.round.index - 1, 0),
        "global_step": run.round.index,
        "algorithm": type(algorithm).__name__,
        "max_rounds": int(run.settings.max_rounds),
        "seed": run.seed,
        "partition": run.datamodule.split.hash,
        "total_bytes": float(run.scalars.total_bytes),
        "metrics": map_values(float, run.scalars.last),
        "federation": {
            "parameters": dict(server.parameters),  # on_save_checkpoint may change it
            "buffers": dict(server.buffers),
            "version": server.version,
            "extra": map_values(dict, server.extra),
            "server_optimizer": {} if left_out else optimizer_state(run.server_optimizer),
            "clients": {} if left_out else algorithm.clients.state_dict(),
            "client_states_left_out": left_out,
            "states": {},
        },
    }
    algorithm.on_save_checkpoint(checkpoint)
    return checkpoint


@contextmanager
def reading(run: Run) -> Iterator[None]:
    """Inside, an error that an edited entry of a checkpoint can cause names the file.

    Each part of a command reads some of its entries, so the commands run inside. Errors of later
    rounds than the first after the checkpoint are the run's own.

    Args:
        run: The run.

    Raises:
        ValueError: In place of the error.
    """
    run.loaded_round = run.round.index
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        path, later = run.ckpt_path, run.round.index > run.loaded_round + 1
        if path is None or later or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"ckpt_path: a run that began with {path} ended by {error!r}. If one without it does "
            "not, an entry of the file lacks a part or does not fit: use another checkpoint of the "
            "run. FEDSSL_TRACEBACK=1 shows where it was read"
        ) from error


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
            f"give --model {loaded['algorithm']}, or the configuration of its run"
        )
    server = run.algorithm.server
    state = loaded["federation"]
    run.algorithm.on_load_checkpoint(loaded)
    other_tensors = {**frozen_state(run.algorithm), **server.personal}
    saved = select(loaded["state_dict"], other_tensors) | state["parameters"] | state["buffers"]
    if wrong := {*shapes_of(server.model() | other_tensors)} ^ {*shapes_of(saved)}:
        raise ValueError(
            f"ckpt_path: {path} holds another network: {min(wrong)[0]} does not fit; "
            "use the config.yaml of the checkpoint's run folder"
        )
    # Callbacks evaluate other models, such as group means, together with the global model of the
    # same round.
    server.extra = map_values(dict, state["extra"])
    server.to(run.fabric.device)
    server.update(select(saved, server.all_tensors()))
    load_state(run.algorithm, select(saved, other_tensors))
    server.version = state["version"]
    run.loaded_round = loaded["round"]
    run.round = Round(run.loaded_round, run.settings.max_rounds)
    run.algorithm.current_round = run.round
    run.algorithm.origin = {key: loaded[key] for key in ("seed", "partition", "model")}
    restore(run.hooks.callbacks, loaded["callbacks"])
    return loaded


def load_personal(
    algorithm: FederatedAlgorithm, loaded: checkpoint_file.Checkpoint, path: Path
) -> None:
    """Load the weights that clients keep for themselves, for evaluation; say if some are missing.

    Args:
        algorithm: The method.
        loaded: What :func:`load_model` has returned.
        path: Its file.
    """
    if algorithm.server.personal:
        _read_states(loaded, path, needed=False)
        algorithm.clients.load_state_dict(loaded["federation"]["clients"])


_LOGGED_ONCE = ("test/", "bound/")
"""The beginnings of the scalars of a run's end."""

_OF_SAMPLES = ("task", "class_names", "input", "normalization", "target_normalization")


def origin_of(seed: int, data: FederatedDataModule) -> dict[str, Any]:
    """The data that a run trains on, under the keys that a checkpoint has for them."""
    return {"seed": seed, "partition": data.split.hash, "model": describe_data(data)}


def check_same_samples(
    data: FederatedDataModule,
    origin: Mapping[str, Any],
    path: Path | None,
    allow_changed: bool,
) -> None:
    """Refuse a model of other classes, of another kind of samples, or of samples that were
    normalised otherwise.

    Args:
        data: The data.
        origin: The content of the checkpoint, or what :func:`origin_of` gave when the model was
            trained.
        path: The checkpoint; None for a model that was trained in this process.
        allow_changed: Only warn of what differs.

    Raises:
        ValueError: Naming what differs by more than rounding.
    """
    saved = origin.get("model", {})
    now = describe_data(data)
    changed = [n for n in _OF_SAMPLES if n in saved and not _same(saved[n], now[n])]
    if not changed:
        return
    name = changed[0]
    difference = f"{name.replace('_', ' ')} {saved[name]}, but these data have {now[name]}"
    problem = f"{path or 'the model'} was trained on data with the {difference}"
    if allow_changed:
        _log.warning("%s", problem)
        return
    raise ValueError(
        f"{_key(path)}{problem}; {_remedy(path)}, or go on nevertheless by "
        "--trainer.allow_changed true"
    )


def _key(path: Path | None) -> str:
    return "ckpt_path: " if path else ""


def _remedy(path: Path | None) -> str:
    if path is None:
        return "give the data module that it was trained with"
    return "use the data keys of the config.yaml of the checkpoint's run folder"


def _same(a: Any, b: Any) -> bool:
    """Whether two plain values are equal, floats up to rounding, because a mean depends on the
    machine's order.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
    return bool(a == b)


def check_same_data(
    seed: int, data: FederatedDataModule, origin: Mapping[str, Any], path: Path | None
) -> None:
    """Refuse a model of another seed or partition: it may have trained on what is held out here.

    Args:
        seed: The seed of the command.
        data: The data.
        origin: See :func:`check_same_samples`.
        path: See :func:`check_same_samples`.

    Raises:
        ValueError: Naming the key that differs.
    """
    subject = path or "the model"
    if origin["seed"] != seed:
        raise ValueError(
            f"seed_everything is {seed}, but {subject} is of a run with {origin['seed']}: "
            "give that seed"
        )
    if origin["partition"] != data.split.hash:
        raise ValueError(
            f"{_key(path)}{subject} was made on another partition of the data; {_remedy(path)}"
        )


def resume(run: Run, path: Path) -> int:
    """Restore a run as it was at the end of a round.

    Returns:
        That round.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, or of another algorithm, network, seed, partition or
            other data.
    """
    loaded = load_model(run, path)
    data, allowed = run.datamodule, run.settings.allow_changed
    check_same_data(run.seed, data, loaded, path)
    # Before the normalisation, which changes with the samples.
    _check_settings(run, loaded, path)
    check_same_samples(data, loaded, path, allowed)
    _warn_of_a_stretched_schedule(run.algorithm.schedule, run.settings.max_rounds, loaded)
    _read_states(loaded, path, needed=not allowed)
    state = loaded["federation"]
    if not allowed:
        _check_states(loaded, path)
    if state["server_optimizer"]:
        load_optimizer_state(run.server_optimizer, state["server_optimizer"])
    run.algorithm.clients.load_state_dict(state["clients"])
    run.algorithm.clients.files.update(state["states"])
    # The test of a run that had finished is not a test of the longer run.
    metrics = loaded["metrics"]
    last = exclude(metrics, starting_with(_LOGGED_ONCE, metrics))
    evaluated = exclude(loaded["model"]["metric_rounds"], ["test"])
    run.scalars.restore(last, evaluated, loaded["total_bytes"])
    return int(loaded["round"])


def continue_curves(run: Run, path: Path) -> None:
    """Log the rounds of the run that is resumed again, so that ``metrics.csv`` and the curves are
    those of one run.

    Args:
        run: The run, which is in another folder.
        path: The checkpoint that it resumes.
    """
    earlier = path.absolute().parent.with_name("metrics.csv")
    if (
        not run.folder.log_dir
        or not earlier.is_file()
        or earlier.parent.resolve() == Path(run.folder.log_dir).resolve()
    ):
        return
    # A killed process may have cut the last one.
    whole_rows = earlier.read_text(encoding="utf-8").rpartition("\n")[0]
    for row in csv.DictReader(whole_rows.splitlines()):
        step = int(row["step"])
        scalars = {k: float(v) for k, v in row.items() if v and k not in ("step", "epoch")}
        # The resumed run logs the row of its end itself.
        if not starting_with(_LOGGED_ONCE, scalars) and step <= run.round.index:
            run.folder.log_metrics(scalars, step)


def _check_settings(run: Run, loaded: checkpoint_file.Checkpoint, path: Path) -> None:
    """Refuse to resume with other settings, unless they are allowed to differ."""
    changed = differences(loaded["model"]["settings"], run.described)
    if not changed:
        return
    of_states = ("trainer.precision ", "model.optimizer ", "model.aggregation_optimizer ")
    refused = any(text.startswith(of_states) for text in changed)
    if run.settings.allow_changed and not refused:
        _log.warning("resuming %s with other settings: %s", path, ", ".join(changed))
        return
    raise ValueError(
        f"ckpt_path: {path} is of a run with other settings: {', '.join(changed)}; use those of "
        "the checkpoint (its run folder has them in config.yaml), or resume with the new ones, "
        "another precision or optimizer excepted, by --trainer.allow_changed true"
    )


def _warn_of_a_stretched_schedule(
    schedule: Schedule, now: int, loaded: checkpoint_file.Checkpoint
) -> None:
    """Say that a longer run has other learning rates than the checkpoint's run planned."""
    before = loaded["max_rounds"]
    planned, actual = (schedule.checked_factor(loaded["round"] + 1, r) for r in (before, now))
    if planned != actual:
        _log.warning(
            "model.schedule: the learning rates follow trainer.max_rounds, which was %d and is %d: "
            "the next round has %.3g of the optimizer's rate, planned were %.3g. So this is not "
            "the run of %d rounds; train anew for that, or set model.schedule.rounds before",
            before, now, actual, planned, now,
        )  # fmt: skip


def _check_states(loaded: checkpoint_file.Checkpoint, path: Path) -> None:
    """Refuse a stored tensor that is not finite, or that has the name of a weight, and not its
    shape.
    """
    state = loaded["federation"]
    weights = {**loaded["state_dict"], **state["parameters"]}
    stored = {**state["extra"], **add_prefix("client ", state["clients"])}
    for place, tensors in stored.items():
        for name, t in tensors.items():
            weight = name if place in state["extra"] else name.partition(".")[2]
            fits = t.shape == weights.get(weight, t).shape and t.isfinite().all()
            if t.dim() and not fits:
                raise ValueError(
                    f"ckpt_path: {name} of {place} in {path} has not the shape of its weight, "
                    "or is not finite; use "
                    "another checkpoint of the run, or --trainer.allow_changed true if it is meant"
                )


def _read_states(loaded: checkpoint_file.Checkpoint, path: Path, needed: bool) -> None:
    """Read the states of optimizers and clients; go on without those that are not there if they
    are not needed.
    """
    missing = checkpoint_file.read_states(loaded, path)
    if loaded["federation"]["client_states_left_out"]:
        missing = ["all clients and of the server's optimizer"]
    if not missing:
        return
    names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else "")
    problem = (
        f"{path} lacks the states (clients' own weights, optimizers' momentum and the like) of "
        f"{names}, which last.ckpt has in "
        f"{checkpoint_file.states_of(path.with_name('last.ckpt')).name}"
    )
    if needed:
        raise ValueError(
            f"ckpt_path: {problem}: it can be evaluated and exported; to resume the run, give "
            "--ckpt_path last with this folder beside it, or let these states begin anew by "
            "--trainer.allow_changed true"
        )
    _log.warning("going on without states: %s", problem)
