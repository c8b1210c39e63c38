"""The command ``fit``: the only loop over rounds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
from torch import Tensor

from lightning_fedssl import sampling
from lightning_fedssl.callback import FederatedCallback
from lightning_fedssl.distributed.signals import StopRequest
from lightning_fedssl.functional.averaging import is_finite
from lightning_fedssl.hooks import Call
from lightning_fedssl.interop.lightning_names import WRITERS
from lightning_fedssl.metrics.rounds import Metrics
from lightning_fedssl.round import Round
from lightning_fedssl.run import Run
from lightning_fedssl.state import ServerState
from lightning_fedssl.trainer import checkpointing, evaluation
from lightning_fedssl.trainer.callback_list import check_monitors
from lightning_fedssl.trainer.federation import RunFederation

_log = logging.getLogger(__name__)


def fit(trainer: Run, federation: RunFederation, begins: Callable[[], object]) -> Metrics:
    """Train until ``max_rounds``, a signal or a callback ends the run, then evaluate on the test
    images.

    Args:
        trainer: The trainer; its ``ckpt_path`` is the checkpoint to resume.
        federation: What the algorithm may ask for.
        begins: Called as soon as a signal lets every rank finish its round.

    Returns:
        The scalars of the test; empty after a signal, and for a checkpoint of more rounds than
        ``max_rounds``.
    """
    forget_earlier_run(trainer)
    first = 1 if trainer.ckpt_path is None else checkpointing.resume(trainer, trainer.ckpt_path) + 1
    if first > trainer.max_rounds:
        _log.warning(
            "the checkpoint has done %d rounds and trainer.max_rounds is %d: nothing to train%s",
            first - 1, trainer.max_rounds,
            "; the model is only "
            "tested" if first == trainer.max_rounds + 1 else ", raise trainer.max_rounds",
        )  # fmt: skip
        if first > trainer.max_rounds + 1:
            return {}
    if problem := trainer.algorithm.schedule.problem(trainer.max_rounds):
        _log.warning(problem)
    with checkpointing.folder_of_one_run(trainer):
        for hook in ("on_fit_start", "on_train_start"):
            trainer.hooks.call(hook)
        trainer.algorithm.origin = checkpointing.origin_of(trainer.seed, trainer.datamodule)
        if trainer.ckpt_path is not None:
            checkpointing.continue_curves(trainer, trainer.ckpt_path)
        stops = first > trainer.max_rounds or (first > 1 and had_ended(trainer))
        sent = None  # an earlier command has logged the row of the round
        trainer.should_stop = False
        with (
            StopRequest() as stop,
            torch.random.fork_rng([] if trainer.fabric.device.type == "cpu" else None),
        ):
            trainer.gather(None)  # from here on SIGTERM ends no rank: the first round takes place
            begins()
            while not stops:
                sent = run_round(trainer, federation, trainer.round_index + 1)
                stops = ends_now(trainer, federation, stop, trainer.round_index == first)
        metrics = {}
        if trainer.interrupted:
            # First, because the process may be killed before the next call has ended.
            checkpointing.save_missing(trainer)
            # So that the saved model has statistics that belong to its weights.
            trainer.hooks.call("on_evaluation_start")
        else:
            metrics = evaluation.evaluate(trainer, "test")
            trainer.log_metrics(metrics | trainer.scalars.bytes_of_test(trainer.gather, sent))
        for hook in ("on_train_end", "on_fit_end"):
            trainer.hooks.call(hook)
    return metrics


def forget_earlier_run(trainer: Run) -> None:
    """Reset what all but the model's weights remember of an earlier run, before a checkpoint is
    loaded.
    """
    trainer.reset()
    for callback in trainer.callbacks:  # Lightning's own keep their state, as in Lightning
        if isinstance(callback, FederatedCallback):
            callback.reset()
    trainer.algorithm.clients.load_state_dict({})
    trainer.algorithm.server.forget()


def had_ended(trainer: Run) -> bool:
    """Whether a callback had ended the run that is resumed: it sets ``should_stop`` before the
    first round.

    Lightning's ``EarlyStopping`` does not; it would train another round.
    """
    stops = trainer.should_stop
    for callback in trainer.callbacks:
        if isinstance(callback, EarlyStopping):
            stops |= callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED
    ended = any(trainer.gather(stops))
    if ended:
        _log.warning(
            "a callback or a spent privacy budget had ended this run after round %d: nothing to "
            "train; to resume it, change or remove the callback, or raise epsilon",
            trainer.round_index,
        )
    return ended


def ends_now(trainer: Run, federation: RunFederation, stop: StopRequest, is_first: bool) -> bool:
    """Whether the run ends after this round: all rounds are done, or a signal or a callback of any
    rank asks for it.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, Timer) and (left := callback.time_remaining()) is not None:
            trainer.should_stop |= left <= 0
    ranks = trainer.gather((stop.number, trainer.should_stop, federation.trained))
    numbers, asks, trained = zip(*ranks, strict=True)
    number = max(numbers)
    asked = max(asks)
    if is_first and set().union(*trained) == {False}:
        _log.warning(
            "round %d: no client has trained, because %s.training_step returned None for every "
            "batch, which skips it; if this is not intended, return the loss",
            trainer.round_index, type(trainer.algorithm).__name__,
        )  # fmt: skip
    is_last = trainer.round_index == trainer.max_rounds
    trainer.hooks.call("on_pictures", is_last or asked)
    if number:
        _log.warning("stopped after round %d; resume with --ckpt_path last", trainer.round_index)
        trainer.interrupt(number)
    elif asked:
        _log.info("a callback asked to stop after round %d", trainer.round_index)
    return is_last or number > 0 or asked


def run_round(trainer: Run, federation: RunFederation, index: int) -> Metrics:
    """One round: draw the cohort, let the algorithm train, evaluate if it is due, log.

    Args:
        trainer: The run.
        federation: What the algorithm may ask for.
        index: The number of the round.

    Returns:
        The bytes of the round, by name.
    """
    trainer.folder.use()
    started = time.perf_counter()
    # A resumed run draws the same.
    torch.manual_seed(sampling.derive_key(trainer.seed, "round", index))
    optimizers = (trainer.client_optimizer, trainer.server_optimizer)
    trainer.algorithm.set_learning_rates(optimizers, index, trainer.max_rounds)
    trainer.enter(new_round(trainer, index))
    for hook in ("on_train_epoch_start", "on_round_start"):
        trainer.hooks.call(hook)
    trainer.enter(replace(trainer.round, client_lr=trainer.client_lr))  # a callback may have set it
    federation.start_round()
    trainer.algorithm.on_round_start()
    lr = trainer.client_lr
    trainer.algorithm.round(federation)
    federation.judge.end_round()
    check_server(trainer.algorithm.server, trainer.fabric, index)
    federation.end_round()
    trainer.hooks.call("on_global_model")
    check_finite(trainer.algorithm.server, index)  # callbacks may have measured statistics
    if federation.judge.client_seconds:
        images = trainer.scalars.weight("client/loss")
        trainer.scalars.count("time/client_samples_per_s", images / federation.judge.client_seconds)
    seconds = time.perf_counter() - started
    scalars, sent = trainer.scalars.end_round(trainer.gather, trainer.cohort, seconds)
    metrics = {"lr": lr} | scalars
    due = trainer.datamodule.has_validation and trainer.evaluates_now
    if due:
        metrics |= evaluation.evaluate(trainer, "validate")
    trainer.log_metrics(metrics)
    if due or not trainer.datamodule.has_validation:
        check_monitors(trainer.hooks.listeners["on_train_epoch_end"], trainer.callback_metrics)
    # Every checkpoint, also one of Lightning's ModelCheckpoint, holds what the others did.
    calls: list[Call] = [("on_train_epoch_end", ()), ("on_round_end", (metrics,))]
    trainer.hooks.call_in_turn([("on_validation_end", ()), *calls] if due else calls, WRITERS)
    return sent


def new_round(trainer: Run, index: int) -> Round:
    """A round with its cohort and learning rates."""
    last = trainer.max_rounds
    schedule = trainer.algorithm.schedule
    factors = [schedule.checked_factor(t, last) for t in (index, min(index + 1, last))]
    return Round(
        index,
        last,
        trainer.draw_cohort(index),
        trainer.datamodule.num_clients,
        trainer.clients_per_round,
        trainer.client_lr,
        min(1.0, max(factors)),  # rates may change within a round
    )


def check_server(server: ServerState, fabric: Fabric, round_index: int) -> None:
    """Refuse a global model that is not finite; make the global models of all ranks equal.

    They differ only where kernels are not deterministic, which is on CUDA devices.

    Raises:
        ValueError: If a weight or a buffer is not finite.
    """
    check_finite(server, round_index)
    if fabric.world_size > 1 and fabric.device.type == "cuda":
        for state in (server.parameters, server.buffers, server.personal, *server.extra.values()):
            for tensor in state.values():
                if tensor.dim():
                    torch.distributed.broadcast(tensor, src=0)


def check_finite(server: ServerState, round_index: int) -> None:
    """Refuse a global model that is not finite.

    Raises:
        ValueError: If a weight or a buffer is not finite.
    """
    model = {**server.model(), **server.personal}
    if not is_finite(filter(Tensor.is_floating_point, model.values())):
        raise ValueError(
            f"round {round_index}: the global model has weights or buffers that are not finite: "
            "training diverged; lower the learning rate (model.optimizer.init_args.lr) or set "
            "model.gradient_clip_norm. Checkpoints of earlier rounds are as they were"
        )
