"""Every digits configuration: what reaches a client and what leaves it has an entry in the ledger, tensor by tensor."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_fedssl.algorithms import FedMatch
from lightning_fedssl.algorithms.common.cohort_slots import SlotAlgorithm
from lightning_fedssl.cli import FederatedCLI
from tests.toy import Transfers

CONFIGS = sorted(path.name for path in (Path(__file__).parent.parent / "configs").glob("*_digits.yaml"))
ROUNDS = 2
MORE = {
    "fedmatch_digits.yaml": ["--model.helper_interval=2", "--trainer.clients_per_round=20"],  # helpers in round 2
    "fedrgd_digits.yaml": ["--model.server_only_rounds=0"],
}
TRAINS_LATER = ("supervised", "semifl")
"""Configurations in which no client trains in the first two rounds: the server does, or no image is confident."""
Key = tuple[int, int]
"""A round and a client."""


class Watch:
    """Records what the server gives to clients and takes from them, where it happens and not where it is counted.

    Attributes:
        down: The tensors that a client has received in a round, by name.
        up: The tensors of a client's update, by name.
        changed: The number of entries of a sent weight that differ from the server's, by name.
        images: The number of images of a client's update.
        validated: The clients that have read the validation images, with the number of their bytes.
        kept_for: The tensors that the server keeps for a cohort slot, and that a client in it starts from, by name.
    """

    def __init__(self, cli: Any) -> None:
        self.algorithm, self.trainer, self.party = cli.model, cli.trainer, -1
        self.down: dict[Key, dict[str, Tensor]] = defaultdict(dict)
        self.up: dict[Key, dict[str, Tensor]] = {}
        self.changed: dict[Key, dict[str, int]] = {}
        self.images: dict[Key, int] = {}
        self.validated: dict[int, int] = {}
        self.kept_for: dict[Key, dict[str, int]] = {}
        for name in ("broadcast", "on_client_start", "on_client_end"):
            vars(self.algorithm)[name] = getattr(self, name)(getattr(self.algorithm, name))
        get = self.algorithm.clients.get
        vars(self.algorithm.clients)["get"] = lambda client, kind: self.read(client, kind, get(client, kind))

    @property
    def round_index(self) -> int:
        return int(self.trainer.round_index)

    def broadcast(self, call: Any) -> Any:
        def broadcast(client: int) -> Any:
            self.party, received = client, call(client)
            self.down[self.round_index, client] |= received
            return received

        return broadcast

    def on_client_start(self, call: Any) -> Any:
        def on_client_start(data: Any) -> Any:
            self.party, work = data.party, call(data)
            self.down[self.round_index, data.party] |= work.extra_download
            return work

        return on_client_start

    def on_client_end(self, call: Any) -> Any:
        def on_client_end(update: Any) -> Any:
            federation, key = self.algorithm.federation, (self.round_index, update.client)
            batches = federation.validation_batches

            def read() -> Any:
                found = list(batches())
                self.validated[update.client] = sum(x.numel() + 8 * y.numel() for x, y in found)
                return iter(found)

            federation.validation_batches = read
            update = call(update)
            federation.validation_batches = batches
            payload = {f"payload.{name}": t for name, t in update.payload.items()}
            self.up[key] = {**update.parameters, **update.buffers, **payload}
            sent = self.algorithm.server.parameters
            self.changed[key] = {name: int((p != sent[name]).sum()) for name, p in update.parameters.items()}
            self.images[key] = update.num_samples
            return update

        return on_client_end

    def read(self, client: int, kind: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the server keeps and a client's training needs, such as the momentum of a cohort slot."""
        starts = (self.round_index, self.party) not in self.up
        if kind == "optimizer" and isinstance(self.algorithm, SlotAlgorithm) and state and starts:
            self.kept_for[self.round_index, self.party] = {f"optimizer.{n}": t.nbytes for n, t in state.items()}
        return state


def run(folder: Path, config: str, *more: str) -> tuple[Watch, dict[tuple[Key, str], dict[str, int]]]:
    """The watched run, and its ledger by round, client and direction."""
    options = [f"--trainer.max_rounds={ROUNDS}", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]
    options += [f"--trainer.default_root_dir={folder}", "--data.max_train_images=400", *MORE.get(config, []), *more]
    cli: Any = FederatedCLI(args=["--config", config, *options], run=False)
    transfers, watch = Transfers(), Watch(cli)
    cli.trainer.given_callbacks.append(transfers)
    cli.trainer.fit(cli.model, cli.datamodule)
    ledger: dict[tuple[Key, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for round_index, client, direction, sizes in transfers.seen:
        for name, size in sizes.items():
            ledger[(round_index, client), direction][name] += size
    return watch, ledger


@pytest.mark.parametrize("config", CONFIGS)
def test_everything_that_is_sent_has_an_entry(tmp_path: Path, config: str) -> None:
    watch, ledger = run(tmp_path, config)
    sparse = isinstance(watch.algorithm, FedMatch)
    for (round_index, client), received in watch.down.items():
        entries = ledger[(round_index, client), "down"]
        before = {n for t in range(round_index + 1) for n in ledger[(t, client), "down"]}
        for name, tensor in received.items():
            had_it = f"for statistics {name}" in before  # static batch norm: the weights came for the statistics
            assert entries.get(name) == tensor.nbytes or sparse or had_it, (round_index, client, name)
            assert not sparse or 0 <= entries[name] <= tensor.nbytes, (round_index, client, name)
            assert not sparse or round_index > 1 or entries[name] == tensor.nbytes, (round_index, client, name)
    for key, sent in watch.up.items():
        entries = ledger[key, "up"]
        for name, tensor in sent.items():
            count = watch.changed[key].get(name, tensor.numel()) if sparse else tensor.numel()
            assert entries.get(name, 0) == count * tensor.element_size(), (*key, name)
            assert not 0 < count < tensor.numel() or entries[f"{name}.positions"] > 0, (*key, name)
    for key, state in watch.kept_for.items():
        assert {name: ledger[key, "down"].get(name) for name in state} == state
        assert {name: ledger[key, "up"].get(name) for name in state} == state
    assert watch.up or config.startswith(TRAINS_LATER)


def test_the_validation_images_of_fedmatch_are_counted_once(tmp_path: Path) -> None:
    watch, ledger = run(tmp_path, "fedmatch_digits.yaml", "--model.lr_patience=1")
    for client, size in watch.validated.items():
        names = ("validation images", "validation labels")
        assert sum(ledger[(1, client), "down"][name] for name in names) == size
    assert len(watch.validated) == 20
    assert not any(name.startswith("validation") for k in range(20) for name in ledger[(2, k), "down"])
    helpers = {n.partition(" network")[0] for k in range(20) for n in ledger[(2, k), "down"] if n.startswith("helper")}
    assert helpers == {"helper 0", "helper 1"}


@pytest.mark.parametrize(("weighting", "size"), [("samples", 8), ("uniform", 0)])
def test_a_weight_that_changes_from_round_to_round_is_counted(tmp_path: Path, weighting: str, size: int) -> None:
    """SemiFL trains on its confident images, whose number changes; with equal weights the server need not know it."""
    options = [f"--model.client_weighting={weighting}", "--model.threshold=0.3", "--model.client_epochs=1"]
    watch, ledger = run(tmp_path, "semifl_digits.yaml", *options)
    assert watch.up
    for key in watch.up:
        assert ledger[key, "up"].get("number of confident images", 0) == size
    assert len(set(watch.images.values())) > 1
