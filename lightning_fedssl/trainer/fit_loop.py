"""The command ``fit``: the only loop over rounds."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from lightning.pytorch.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
from lightning.pytorch.trainer.states import TrainerStatus
from torch.optim import Optimizer

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.functional.averaging import is_finite
from lightning_fedssl.metrics import means_of, totals_of
from lightning_fedssl.state import set_learning_rate
from lightning_fedssl.trainer import checkpointing, evaluation
from lightning_fedssl.trainer.federation import SimulatedFederation
from lightning_fedssl.trainer.run import BYTES, Run
from lightning_fedssl.trainer.signals import StopRequest

_log = logging.getLogger(__name__)


def fit(run: Run, federation: SimulatedFederation, ckpt_path: Path | None) -> dict[str, float]:
    """Train until ``max_rounds``, a signal or a callback ends the run; then evaluate on the test images.

    Args:
        run: The run.
        federation: What the algorithm may ask for.
        ckpt_path: The checkpoint to resume; a new run if left out.

    Returns:
        The scalars of the test; empty after a signal, and for a checkpoint of more rounds than ``max_rounds``.
    """
    run.forget_earlier_run()
    done, max_rounds = 0, run.trainer.max_rounds
    if ckpt_path is not None:
        done = checkpointing.resume(run, ckpt_path)
    if done > max_rounds:
        _log.warning(
            "the checkpoint has done %d rounds, more than trainer.max_rounds %d: nothing to train; raise "
            "trainer.max_rounds, or evaluate the checkpoint by the command test", done, max_rounds,
        )  # fmt: skip
        return {}
    if done == max_rounds:
        _log.warning("the checkpoint has done all %d rounds: nothing to train, the model is only tested", done)
    if problem := run.algorithm.schedule.problem(max_rounds):
        _log.warning(problem)
    with checkpointing.folder_of_one_run(run):
        checkpointing.set_earlier_run_aside(run, ckpt_path)
        for hook in ("on_fit_start", "on_train_start"):
            run.call(hook)
        run.algorithm.origin = checkpointing.origin_of(run)
        if ckpt_path is None or not had_ended(run):
            run_rounds(run, federation, done + 1)
        metrics: dict[str, float] = {}
        if run.status.state.status == TrainerStatus.INTERRUPTED:
            checkpointing.save_missing(run)  # the process may be killed before the next line has ended
            run.call("on_evaluation_start")  # so that the saved model has statistics that belong to its weights
        else:
            metrics = evaluation.evaluate(run, "test")
            run.log_metrics(metrics | bytes_of_test(run))
        for hook in ("on_train_end", "on_fit_end"):
            run.call(hook)
    return metrics


def had_ended(run: Run) -> bool:
    """Whether a callback had ended the run that is resumed: it sets ``should_stop`` before the first round.

    Lightning's ``EarlyStopping`` does not; it would train another round.
    """
    for callback in run.hooks.callbacks:
        if isinstance(callback, EarlyStopping) and callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED:
            _log.info("EarlyStopping: %s had ended the run before its checkpoint", callback.monitor)
            run.status.should_stop = True
    ended = any(run.gather(run.status.should_stop))
    if ended:
        _log.warning(
            "a callback had ended this run after round %d: nothing to train; to resume it, change or remove the "
            "callback",
            run.status.round_index,
        )
    return ended


def run_rounds(run: Run, federation: SimulatedFederation, first: int) -> None:
    """Run the rounds from ``first`` to ``max_rounds``, unless a signal or a callback of any rank asks to stop."""
    run.status.should_stop = False
    with StopRequest() as stop, torch.random.fork_rng([] if run.fabric.device.type == "cpu" else None):
        run.gather(None)  # from here on SIGTERM ends no rank: the first round, which keeps the run folder, takes place
        for round_index in range(first, run.trainer.max_rounds + 1):
            run.status.round_index = round_index
            run_round(run, federation)
            ranks = run.gather((stop.signal_name is not None, run.status.should_stop, federation.trained))
            requests = [(interrupted, stops) for interrupted, stops, _ in ranks]
            if round_index == first:
                warn_of_skipped_batches(run, set().union(*(trained for *_, trained in ranks)))
            run.call("on_pictures", round_index == run.trainer.max_rounds or any(stops for _, stops in requests))
            if any(interrupted for interrupted, _ in requests):
                _log.warning("stopped after round %d; resume with --ckpt_path last", round_index)
                run.status.state.status = TrainerStatus.INTERRUPTED
                return
            if any(stops for _, stops in requests):
                _log.info("a callback asked to stop after round %d", round_index)
                return


def run_round(run: Run, federation: SimulatedFederation) -> None:
    """One round: draw the cohort, let the algorithm train, evaluate if it is due, log."""
    run.folder.use()
    torch.manual_seed(sampling.derive_key(run.seed, "round", run.status.round_index))  # also after a resume
    started = time.perf_counter()
    draw_cohort(run)
    for hook in ("on_train_epoch_start", "on_round_start"):
        run.call(hook)
    begin_round(run, federation)
    lr = run.client_lr
    run.algorithm.round(federation)
    federation.participation.end_round()
    check_server(run)
    federation.end_round()
    run.call("on_global_model")
    metrics = round_metrics(run, federation, time.perf_counter() - started) | {"lr": lr}
    due = run.datamodule.has_validation and run.evaluates_now
    if due:
        metrics |= evaluation.evaluate(run, "validate")
    run.log_metrics(metrics)
    for group in run.hooks.without_and_with_checkpoints:
        if due:
            group.call("on_validation_end")
        group.call("on_train_epoch_end")
        group.call("on_round_end", metrics)


def warn_of_skipped_batches(run: Run, trained: set[bool]) -> None:
    """Log that clients had batches in this round, but that none of them made a step.

    Args:
        run: The run.
        trained: What the clients of all ranks did (:class:`SimulatedFederation`).
    """
    if trained == {False}:
        _log.warning(
            "round %d: no client has trained, because %s.training_step returned None for every batch, which skips "
            "it; if this is not intended, return the loss",
            run.status.round_index, type(run.algorithm).__name__,
        )  # fmt: skip


def draw_cohort(run: Run) -> None:
    """Draw the clients of the round."""
    size = cohort_size(run.reporting.selected, run.trainer.fast_dev_run)
    run.status.cohort = sampling.cohort(run.seed, run.status.round_index, run.datamodule.num_clients, size)


def begin_round(run: Run, federation: SimulatedFederation) -> None:
    """Set the learning rates of the round, and prepare the federation and the algorithm for it."""
    optimizers = (run.client_optimizer, run.server_optimizer)
    set_learning_rates(run.algorithm, optimizers, run.status.round_index, run.trainer.max_rounds)
    federation.start_round()
    run.algorithm.on_round_start()


def cohort_size(selected: int, fast_dev_run: bool) -> int:
    """Clients drawn in a round."""
    return min(selected, 2) if fast_dev_run else selected


def set_learning_rates(
    algorithm: FederatedAlgorithm, optimizers: Iterable[Optimizer], round_index: int, max_rounds: int
) -> None:
    """Set the learning rate of a round, and the factors of its steps if it has any.

    Args:
        algorithm: Has the schedule.
        optimizers: Those of clients and server.
        round_index: The round, from 1.
        max_rounds: The length of the run in rounds.
    """
    steps = algorithm.steps_per_round or 0
    times = [round_index + step / steps for step in range(steps)]
    algorithm.step_factors = [algorithm.schedule.checked_factor(time_in_rounds, max_rounds) for time_in_rounds in times]
    for optimizer in optimizers:
        set_learning_rate(optimizer, algorithm.schedule.checked_factor(round_index, max_rounds))


def round_metrics(run: Run, federation: SimulatedFederation, seconds: float) -> dict[str, float]:
    """The scalars of a round over all ranks.

    Args:
        run: The run.
        federation: Knows how long the clients of this rank trained.
        seconds: The duration of the round on this rank.
    """
    images = run.collector.weight("client/loss")
    if federation.client_seconds:
        run.counter.add("time/client_samples_per_s", images / federation.client_seconds)
    parts = run.gather((run.collector.take(), run.counter.take(), seconds))
    metrics = means_of([share for share, _, _ in parts], run.status.cohort)
    counts = totals_of([count for _, count, _ in parts])
    run.bytes_of_round = {name: counts[name] for name in BYTES.values() if name in counts}
    run.status.total_bytes += sum(run.bytes_of_round.values())
    metrics |= counts
    if run.status.total_bytes:
        metrics["communication/total_bytes"] = run.status.total_bytes
    metrics["time/round_s"] = max(duration for _, _, duration in parts)
    return metrics


def bytes_of_test(run: Run) -> dict[str, float]:
    """The scalars of communication with what clients sent and received for the test; empty if they did not.

    They do if statistics of static batch norm are measured on the clients' images, and a callback has ended the run
    after a round that had no evaluation. The bytes are added to those of the last round, whose row has the test.
    """
    counts = totals_of(run.gather(run.counter.take()))
    sent = {name: counts[name] for name in BYTES.values() if counts.get(name)}
    if not sent:
        return {}
    run.status.total_bytes += sum(sent.values())
    whole = {"communication/total_bytes": run.status.total_bytes}
    if run.bytes_of_round is None:  # an earlier command has logged the row of the round
        return whole
    return whole | {name: run.bytes_of_round.get(name, 0.0) + size for name, size in sent.items()}


def check_server(run: Run) -> None:
    """Refuse a global model that is not finite; make the global models of all ranks equal.

    They differ only where kernels are not deterministic, which is on CUDA devices.

    Raises:
        ValueError: If a weight is not finite.
    """
    server = run.algorithm.server
    if not is_finite(server.parameters.values()):
        raise ValueError(
            f"round {run.status.round_index}: the global model has weights that are not finite: training diverged; "
            "lower the learning rate (model.optimizer.init_args.lr) or set model.gradient_clip_norm. Checkpoints "
            "of earlier rounds are as they were"
        )
    if run.fabric.world_size > 1 and run.fabric.device.type == "cuda":
        for state in (server.parameters, server.buffers, *server.extra.values()):
            for tensor in (t for t in state.values() if t.dim()):
                torch.distributed.broadcast(tensor, src=0)
