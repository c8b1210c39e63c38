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
from lightning.pytorch.trainer.states import TrainerStatus
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
from lightning_fedssl.system.availability import Outcome
from lightning_fedssl.trainer import checkpointing, evaluation
from lightning_fedssl.trainer.callback_list import check_monitors
from lightning_fedssl.trainer.federation import RunFederation

_log = logging.getLogger(__name__)

_OF_A_STEP = {"client/loss", "client/refused"}
"""What a client's step logs: a round in which a client has made a step has at least one of them."""


def fit(run: Run, federation: RunFederation, on_ready: Callable[[], object]) -> Metrics:
    """Train until ``max_rounds``, a signal or a callback ends the run, then evaluate on the test
    images.

    Args:
        run: The run; its ``ckpt_path`` is the checkpoint to resume.
        federation: What the algorithm may ask for.
        on_ready: Called once signals are handled: from then on, one ends the run after its round.

    Returns:
        The scalars of the test; empty after a signal, and for a checkpoint of more rounds than
        ``max_rounds``.

    Raises:
        ValueError: If every update of every client was rejected, in a run that began with round 1.
    """
    forget_earlier_run(run)
    last = run.settings.max_rounds
    first = 1 if run.ckpt_path is None else checkpointing.resume(run, run.ckpt_path) + 1
    if first > last:
        _log.warning(
            "the checkpoint has done %d rounds and trainer.max_rounds is %d: nothing to train%s",
            first - 1, last,
            "; the model is only "
            "tested" if first == last + 1 else ", raise trainer.max_rounds",
        )  # fmt: skip
        if first > last + 1:
            return {}
    if problem := run.algorithm.schedule.problem(last):
        _log.warning(problem)
    with checkpointing.folder_of_one_run(run):
        for hook in ("on_fit_start", "on_train_start"):
            run.hooks.call(hook)
        run.algorithm.origin = checkpointing.origin_of(run.seed, run.datamodule)
        if run.ckpt_path is not None:
            checkpointing.continue_curves(run, run.ckpt_path)
        stops = first > last or (first > 1 and already_stopped(run))
        sent = None  # an earlier command has logged the row of the round
        run.should_stop = False
        with (
            StopRequest() as stop,
            torch.random.fork_rng([] if run.fabric.device.type == "cpu" else None),
        ):
            run.gather(None)  # from here on SIGTERM ends no rank: the first round takes place
            on_ready()
            outcomes = set[Outcome]()
            while not stops:
                index = run.round.index + 1
                # A resumed run draws the same.
                torch.manual_seed(sampling.derive_key(run.seed, "round", index))
                sent = run_round(run, federation, index)
                outcomes |= set(run.participation.values())
                stops = should_end(run, stop)
        metrics = {}
        if run.state.status == TrainerStatus.INTERRUPTED:
            # First, because the process may be killed before the next call has ended.
            checkpointing.save_missing(run.hooks)
            # So that the saved model has statistics that belong to its weights.
            run.hooks.call("on_evaluation_start")
        else:
            if first == 1 and "rejected" in outcomes and "finished" not in outcomes:
                raise ValueError(
                    "no client's update was accepted in any round, so the clients have taught the "
                    "model nothing; the log names the reason for each: lower the learning rate "
                    "(model.optimizer.init_args.lr), or scale the inputs (data.normalize)"
                )
            metrics = evaluation.evaluate(run, "test")
            run.log_metrics(metrics | run.scalars.bytes_of_test(run.gather, sent))
        for hook in ("on_train_end", "on_fit_end"):
            run.hooks.call(hook)
    return metrics


def forget_earlier_run(run: Run) -> None:
    """Forget all of an earlier run but the model's weights, before a checkpoint is loaded."""
    run.reset()
    for callback in run.hooks.callbacks:  # Lightning's own keep their state, as in Lightning
        if isinstance(callback, FederatedCallback):
            callback.reset()
    run.algorithm.clients.load_state_dict({})
    run.algorithm.server.forget()


def already_stopped(run: Run) -> bool:
    """Whether a callback had ended the run that is resumed: it sets ``should_stop`` before the
    first round.

    Lightning's ``EarlyStopping`` does not; it would train another round.
    """
    stops = run.should_stop
    for callback in run.hooks.callbacks:
        if isinstance(callback, EarlyStopping):
            stops |= callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED
    ended = any(run.gather(stops))
    if ended:
        _log.warning(
            "a callback or a spent privacy budget had ended this run after round %d: nothing to "
            "train; to resume it, change or remove the callback, or raise epsilon",
            run.round.index,
        )
    return ended


def should_end(run: Run, stop: StopRequest) -> bool:
    """Whether the run ends after this round: all rounds are done, or a signal or a callback of any
    rank asks for it.
    """
    for callback in run.hooks.callbacks:
        if isinstance(callback, Timer) and (left := callback.time_remaining()) is not None:
            run.should_stop |= left <= 0
    numbers, asks = zip(*run.gather((stop.number, run.should_stop)), strict=True)
    number = max(numbers)
    asked = max(asks)
    is_last = run.round.index == run.settings.max_rounds
    run.hooks.call("on_pictures", is_last or asked)
    if number:
        _log.warning("stopped after round %d; resume with --ckpt_path last", run.round.index)
        run.state.status = TrainerStatus.INTERRUPTED
        run.stopped_by = number
    elif asked:
        _log.info("a callback asked to stop after round %d", run.round.index)
    return is_last or number > 0 or asked


def run_round(run: Run, federation: RunFederation, index: int) -> Metrics:
    """One round: draw the cohort, let the algorithm train, evaluate if it is due, log.

    Args:
        run: The run.
        federation: What the algorithm may ask for.
        index: The number of the round.

    Returns:
        The bytes of the round, by name.
    """
    algorithm, scalars, judge = run.algorithm, run.scalars, federation.judge
    run.folder.use()
    started = time.perf_counter()
    optimizers = (run.client_optimizer, run.server_optimizer)
    algorithm.set_learning_rates(optimizers, index, run.settings.max_rounds)
    run.round = algorithm.current_round = new_round(run, index)
    for hook in ("on_train_epoch_start", "on_round_start"):
        run.hooks.call(hook)
    lr = run.client_lr  # a callback may have set it
    run.round = algorithm.current_round = replace(run.round, client_lr=lr)
    federation.start_round()
    algorithm.on_round_start()
    algorithm.round(federation)
    counts = run.settings.faults.availability is not None
    run.participation = judge.end_round(counts)
    equalize(algorithm.server, run.fabric)
    federation.end_round()
    run.hooks.call("on_global_model")
    check_finite(algorithm.server, index)  # also the statistics that callbacks have measured
    if judge.client_seconds:
        images = scalars.weight("client/loss")
        scalars.count({"time/client_samples_per_s": images / judge.client_seconds})
    seconds = time.perf_counter() - started
    collected, sent = scalars.end_round(run.gather, run.round.cohort, seconds)
    if index == 1 and federation.takes_steps and not collected.keys() & _OF_A_STEP:
        _log.warning(
            "round 1: no client has trained, because %s.training_step returned None for every "
            "batch, which skips it; if this is not intended, return the loss",
            type(algorithm).__name__,
        )
    metrics = {"lr": lr} | collected
    validates = run.datamodule.has_validation
    due = validates and run.evaluates_now
    if due:
        metrics |= evaluation.evaluate(run, "validate")
    run.log_metrics(metrics)
    if due or not validates:
        check_monitors(run.hooks.listeners["on_train_epoch_end"], scalars.last)
    # Every checkpoint, also one of Lightning's ModelCheckpoint, holds what the others did.
    calls: list[Call] = [("on_train_epoch_end", ()), ("on_round_end", (metrics,))]
    run.hooks.call_in_turn([("on_validation_end", ()), *calls] if due else calls, WRITERS)
    return sent


def new_round(run: Run, index: int) -> Round:
    """A round with its cohort and learning rates."""
    last = run.settings.max_rounds
    schedule = run.algorithm.schedule
    factors = [schedule.checked_factor(t, last) for t in (index, min(index + 1, last))]
    return Round(
        index,
        last,
        draw_cohort(run, index),
        run.datamodule.num_clients,
        run.clients_per_round,
        run.client_lr,
        min(1.0, max(factors)),  # rates may change within a round
    )


def draw_cohort(run: Run, index: int) -> list[int]:
    """The clients of a round, in drawn order, the same on every rank.

    Args:
        run: The run.
        index: The round.
    """
    for rule in run.settings.updates:
        if (cohort := rule.draw_cohort(run.hooks.trainer, index)) is not None:
            return list(cohort)
    return sampling.cohort(run.seed, index, run.datamodule.num_clients, run.cohort_size)


def equalize(server: ServerState, fabric: Fabric) -> None:
    """Make the global models of all ranks equal.

    They differ only where kernels are not deterministic, which is on CUDA devices.
    """
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
