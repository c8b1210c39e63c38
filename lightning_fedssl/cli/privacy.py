"""The ``privacy`` command: what clients send with a configuration, whether privacy covers it, what
epsilon costs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import JointAlgorithm
from lightning_fedssl.callbacks import StaticBatchNorm
from lightning_fedssl.cli.lightning_cli import FederatedCLI, quiet
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.functional.batch_norm import has_static_batch_norm
from lightning_fedssl.local_training import sequential
from lightning_fedssl.robust.aggregators import why_not_a_mean
from lightning_fedssl.state import LiveTensors, optimizer_state
from lightning_fedssl.trainer import CentralDP, FederatedTrainer
from lightning_fedssl.trainer.federation import SimulatedFederation
from lightning_fedssl.trainer.fit_loop import new_round, set_learning_rates
from lightning_fedssl.trainer.privacy import uncovered

_STATISTICS = {
    "moments": "count, mean and variance of every layer for static batch norm",
    "pooled": "all its images, for static batch norm",
}


class Sent(NamedTuple):
    """Something that a client uploads.

    Attributes:
        what: In words.
        size: Bytes in a round; 0 for a few numbers.
        covered: Whether ``CentralDP`` covers it.
    """

    what: str
    size: int
    covered: bool


def main(
    arguments: Sequence[str], datamodule_class: type[FederatedDataModule] = FederatedDataModule
) -> int:
    """Run ``privacy``; nothing is trained and nothing is written.

    Args:
        arguments: What follows the command's name: the options of ``fit``.
        datamodule_class: A data module of your own.

    Returns:
        The exit code, 0.
    """
    with quiet():
        cli = FederatedCLI(
            [*arguments, "--trainer.logger", "false"], run=False, datamodule_class=datamodule_class
        )
    trainer: FederatedTrainer = cli.trainer  # type: ignore[assignment]
    trainer.prepare(cli.model, cli.datamodule, "fit")
    sys.stdout.write("\n".join([*report(trainer), ""]))
    return 0


def report(trainer: FederatedTrainer) -> Iterator[str]:
    """The lines that the command prints.

    Args:
        trainer: After ``trainer.prepare``.
    """
    algorithm = trainer.algorithm
    yield (
        f"What a client of {type(algorithm).__name__} uploads in a round, and whether "
        "trainer.privacy covers it:"
    )
    for sent in uploads(trainer):
        size = f"{sent.size:,} bytes" if sent.size else "a few numbers"
        yield f"  {'covered' if sent.covered else 'NOT covered':12} {size:>18}  {sent.what}"
    why = why_not_a_mean(algorithm)
    yield f"The server needs only sums: {'no, the method ' + why if why else 'yes'}."
    yield from (
        f"Refused with trainer.privacy: {reason}" for reason in uncovered(trainer, algorithm)
    )
    if why is None:
        yield from cost(trainer)


def uploads(trainer: FederatedTrainer) -> list[Sent]:
    """What clients upload after their first round, as the method itself prepares it.

    None of them learns.

    Args:
        trainer: After ``trainer.prepare``.
    """
    algorithm = trainer.algorithm
    covered, found = why_not_a_mean(algorithm) is None, list[Sent]()
    if isinstance(algorithm, JointAlgorithm):
        found.append(Sent("features of every image, at every step", 0, False))
    if algorithm.trains_clients:
        sizes = _sizes(trainer)
        groups = {name: name.removeprefix("payload.") for name in sizes}
        groups |= {
            name: "further tensors of the network" for name in sizes if name.startswith("network.")
        }
        groups |= {name: "optimizer state" for name in sizes if name.startswith("optimizer.")}
        groups |= dict.fromkeys(algorithm.server.parameters, "weights")
        groups |= dict.fromkeys(algorithm.server.buffers, "statistics of batch norm")
        for group in dict.fromkeys(groups[name] for name in sizes):
            of_model = group in ("weights", "statistics of batch norm")
            size = sum(size for name, size in sizes.items() if groups[name] == group)
            found.append(Sent(group, size, covered and of_model))
        if algorithm.client_weighting == "samples":
            found.append(Sent("number of images, its weight in the mean", 0, False))
        found.append(
            Sent("in a deployment: numbers of images and steps, means of what it logs", 0, False)
        )
    for callback in trainer.callbacks:
        if (
            isinstance(callback, StaticBatchNorm)
            and callback.source != "server"
            and has_static_batch_norm(algorithm)
        ):
            found.append(Sent(_STATISTICS[callback.source], 0, False))
    return found


def _sizes(trainer: FederatedTrainer) -> dict[str, int]:
    algorithm = trainer.algorithm
    algorithm.federation = SimulatedFederation(trainer)
    drawn = sampling.cohort(trainer.seed, 1, trainer.datamodule.num_clients, trainer.cohort_size)
    clients = enumerate(trainer.datamodule.split.clients)
    kinds = {
        (len(images.labeled) > 0, len(images.unlabeled) > 0): client for client, images in clients
    }
    cohort = [*dict.fromkeys([*kinds.values(), *drawn])][: max(len(kinds), len(drawn))]
    set_learning_rates(algorithm, [trainer.client_optimizer], 1, trainer.max_rounds)
    trainer.enter(replace(new_round(trainer, 1), cohort=cohort))
    algorithm.on_round_start()
    live, sent = LiveTensors(algorithm), sequential.Sent.of(algorithm)
    if isinstance(algorithm, JointAlgorithm):
        return {
            n: t.nbytes
            for n, t in {**live.parameters(), **live.buffers()}.items()
            if algorithm.at_clients(n)
        }
    for weight in algorithm.parameters():
        weight.grad = torch.zeros_like(weight)
    trainer.client_optimizer.step()  # for its state
    momentum = optimizer_state(trainer.client_optimizer) if algorithm.keep_client_optimizer else {}
    sizes = dict[str, int]()
    for data in map(trainer.local_data, trainer.cohort):
        work = sequential.start(algorithm, live, data, sequential.NoObserver(), None)
        update = sent.update({**live.parameters(), **live.buffers()}, data, work)
        algorithm.clients.put(algorithm.state_owner(data.party), "optimizer", momentum)
        if (
            work.num_steps
        ):  # a client without steps, as before the first confident label, ends nothing
            with algorithm.clients.stage(data.party):
                update = algorithm.on_client_end(update)
        sizes |= algorithm.upload_sizes(update)
    return sizes


def cost(trainer: FederatedTrainer) -> Iterator[str]:
    """What the run's epsilon means for its accuracy.

    Without ``trainer.privacy`` an example with epsilon 8.
    """
    algorithm, clients = trainer.algorithm, trainer.datamodule.num_clients
    privacy = trainer.privacy or CentralDP(delta=0.1 / clients, epsilon=8)
    budget, names = privacy.calibrate(trainer), sequential.Sent.of(algorithm)
    model, m = algorithm.server.model(), budget.cohort
    count = sum(model[name].numel() for name in (*names.weights, *names.buffers) if name in model)
    statement = privacy.describe_budget(budget)["statement"]
    yield f"{'Privacy' if trainer.privacy else 'An example'}: {statement}."
    times = budget.noise_multiplier * count**0.5 / m
    yield (
        f"Noise multiplier {budget.noise_multiplier:.3g}; in {count:,} numbers the noise on the "
        f"mean is {times:.3g} "
        "times as long as the longest possible mean update."
    )
    if times > 1:
        yield (
            "The noise hides any update: take fewer numbers (freeze layers), more clients, "
            "or a larger epsilon."
        )
