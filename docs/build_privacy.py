"""Writes the table of what clients upload into docs/privacy.md: ``python docs/build_privacy.py``.

Every method is prepared with its configuration on the digits; nothing is trained.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import torch

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import JointAlgorithm
from lightning_fedssl.callbacks import StaticBatchNorm
from lightning_fedssl.cli.lightning_cli import FederatedCLI, quiet
from lightning_fedssl.functional.batch_norm import has_static_batch_norm
from lightning_fedssl.functional.dictionaries import tensors_of
from lightning_fedssl.functional.optimizer_states import optimizer_state
from lightning_fedssl.local_training import LocalTrainingObserver, sequential
from lightning_fedssl.trainer import FederatedTrainer
from lightning_fedssl.trainer.federation import SimulatedFederation
from lightning_fedssl.trainer.fit_loop import new_round
from lightning_fedssl.updates.aggregators import why_not_a_mean

PAGE = Path(__file__).resolve().parent / "privacy.md"
CONFIGS = PAGE.parent.parent / "configs"
HEAD = ["| method | a client uploads, besides numbers of images and steps | needs only sums |", "|---|---|---|"]
MARKS = "<!-- table of build_privacy.py -->"


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
        groups |= {name: "further tensors of the network" for name in sizes if name.startswith("network.")}
        groups |= {name: "change of the control variate" for name in sizes if name.startswith("payload.c.")}
        groups |= {name: "optimizer state" for name in sizes if name.startswith("optimizer.")}
        groups |= dict.fromkeys(algorithm.server.parameters, "weights")
        groups |= dict.fromkeys(algorithm.server.buffers, "statistics of batch norm")
        for group in dict.fromkeys(groups[name] for name in sizes):
            of_model = group in ("weights", "statistics of batch norm")
            size = sum(size for name, size in sizes.items() if groups[name] == group)
            found.append(Sent(group, size, covered and of_model))
        if algorithm.client_weighting == "samples":
            found.append(Sent("number of images, its weight in the mean", 0, False))
        found.append(Sent("in a deployment: numbers of images and steps, means of what it logs", 0, False))
    for callback in trainer.callbacks:
        if isinstance(callback, StaticBatchNorm) and callback.source != "server" and has_static_batch_norm(algorithm):
            found.append(Sent(_STATISTICS[callback.source], 0, False))
    return found


class Unheard(LocalTrainingObserver):
    """Ignores what clients do."""


def _sizes(trainer: FederatedTrainer) -> dict[str, int]:
    run, algorithm = trainer.run, trainer.algorithm
    algorithm.federation = SimulatedFederation(run)
    drawn = sampling.cohort(trainer.seed, 1, trainer.datamodule.num_clients, trainer.cohort_size)
    clients = enumerate(trainer.datamodule.split.clients)
    kinds = {(len(images.labeled) > 0, len(images.unlabeled) > 0): client for client, images in clients}
    cohort = [*dict.fromkeys([*kinds.values(), *drawn])][: max(len(kinds), len(drawn))]
    algorithm.set_learning_rates([trainer.client_optimizer], 1, trainer.max_rounds)
    run.round = algorithm.current_round = replace(new_round(run, 1), cohort=cohort)
    algorithm.on_round_start()
    if isinstance(algorithm, JointAlgorithm):
        return {n: t.nbytes for n, t in tensors_of(algorithm).items() if algorithm.at_clients(n)}
    for weight in algorithm.parameters():
        weight.grad = torch.zeros_like(weight)
    trainer.client_optimizer.step()  # for its state
    momentum = optimizer_state(trainer.client_optimizer) if algorithm.keep_client_optimizer else {}
    phase = sequential.ClientPhase(algorithm, trainer.client_optimizer, trainer.fabric, Unheard())
    sizes = dict[str, int]()
    for data in map(trainer.local_data, trainer.cohort):
        work = phase.start(data)
        update = phase.update(tensors_of(algorithm), data, work)
        algorithm.clients.put(algorithm.state_owner(data.party), "optimizer", momentum)
        if work.num_steps:  # a client without steps, as before the first confident label, ends nothing
            with algorithm.clients.stage(data.party):
                update = algorithm.on_client_end(update)
        sizes |= algorithm.upload_sizes(update)
    return sizes


def rows() -> list[str]:
    """A row for each method, in alphabetical order."""
    found = {}
    for path in sorted(CONFIGS.glob("*_digits.yaml")):
        with quiet():
            cli = FederatedCLI(["--config", str(path), "--trainer.logger", "false"], run=False)
        trainer = cast(FederatedTrainer, cli.trainer)
        trainer.run.algorithm, trainer.run.datamodule = cli.model, cli.datamodule
        trainer.prepare("fit")
        if not cli.model.trains_clients:
            continue
        found_uploads = uploads(trainer)
        sent = [upload.what for upload in found_uploads if not upload.what.startswith("in a deployment")]
        sums = "no" if why_not_a_mean(cli.model) else "yes"
        found[type(cli.model).__name__] = f"| {type(cli.model).__name__} | {'; '.join(sent)} | {sums} |"
    return [row for _, row in sorted(found.items())]


def main() -> None:
    """Replace the table in the page."""
    table = "\n".join([MARKS, "", *HEAD, *rows(), "", MARKS])
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(f"{MARKS}.*{MARKS}", lambda _: table, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
