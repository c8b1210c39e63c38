"""The client side of a deployment: what a machine that holds the data of a client does with a
message.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from lightning.fabric import Fabric
from torch import Tensor

from lightning_fedssl import run
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FedSHVR
from lightning_fedssl.data.class_shares import SiteShares
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.deployment import Settings
from lightning_fedssl.deployment.messages import (
    FOR_STATISTICS,
    LAST_ROUND,
    pack_moments,
    read_order,
    to_records,
)
from lightning_fedssl.deployment.obstacles import refuse_undeployable
from lightning_fedssl.distributed import launch
from lightning_fedssl.functional.averaging import Sizes, State
from lightning_fedssl.functional.dictionaries import (
    add_prefix,
    clone_state,
    exclude,
    map_values,
    remove_prefix,
    select,
)
from lightning_fedssl.functional.frozen import trained_weights
from lightning_fedssl.functional.optimizers import build_optimizer
from lightning_fedssl.local_training import LocalTrainingObserver, sequential
from lightning_fedssl.local_training.moments import measure_moments
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.metrics.rounds import Logged, MetricCollector
from lightning_fedssl.round import Round
from lightning_fedssl.state import ClientStore, load_state, named_payload
from lightning_fedssl.trainer import setup

_log = logging.getLogger(__name__)


class NodeData(Protocol):
    """The data of a node."""

    client: int
    """The number of its client."""

    def local_data(self, round_index: int, dtype: torch.dtype) -> LocalData:
        """What the client may train on in a round."""


class PartOfDataSet:
    """A client of the partition that the configuration describes, of a data set that every node can
    load.

    It is for trials and for data sets that are public anyway: each node reads the whole data set
    and uses its part. The images of others, and the labels of all images but its own labelled ones,
    are dropped at once.

    Args:
        datamodule: The data and their partition, set up.
        client: The client of the node.
    """

    def __init__(self, datamodule: FederatedDataModule, client: int) -> None:
        self.client = client
        data = datamodule.local_data(client, 0)
        images = data.images.index_select(0, torch.cat([data.labeled, data.unlabeled]))
        numbers = torch.arange(len(images), device=images.device)
        labeled, unlabeled = numbers.split([len(data.labeled), len(data.unlabeled)])
        self._data = replace(data, images=images, labeled=labeled, unlabeled=unlabeled)
        self._views = {
            dtype: datamodule.local_data(0, 0, dtype).views
            for dtype in (torch.float32, torch.float64)
        }

    def local_data(self, round_index: int, dtype: torch.dtype) -> LocalData:
        """What the client may train on in a round."""
        return replace(self._data, round=round_index, dtype=dtype, views=self._views[dtype])


class _Received(LocalTrainingObserver):
    """What the local trainer asks of a server, and reports to it; all of it for one client."""

    def __init__(self, state: State, logged: list[Logged]) -> None:
        self.state = state
        self.logged = logged

    def broadcast(self, client: int) -> State:
        """What the client has received."""
        return self.state

    def download_sizes(self, client: int, received: State) -> Sizes:
        """Nothing: the server counts what it sends."""
        return {}

    def state_owner(self, client: int) -> int:
        """The client's own number: a state that is stored under another number comes with the
        broadcast.
        """
        return client

    def client_started(
        self, data: LocalData, work: LocalWork, sizes: Sizes, received: State
    ) -> None:
        """Log the share of confident pseudo-labels, which only the client knows."""
        if work.pseudo_labels is not None and len(mask := work.pseudo_labels.mask):
            self.logged.append(Logged("client/mask_rate", mask.double().mean(), len(mask)))


class Node:
    """Trains the client of one machine as the server's messages request.

    A client's state after a round counts only if the server has accepted the update of that round,
    which the client learns from its next message. So its folder has the states after the last
    accepted round and after the last round, and what the client received in these rounds. It has
    the files of one run: a new run removes those of others.

    Args:
        settings: The keys of the configuration's trainer.
        fabric: Device and precision.
        algorithm: The algorithm, of the same configuration as the server's.
        datamodule: Knows the number of classes and the shape of an image.
        data: The data of the client.
        folder: Where the client's persistent state is stored; only its user may read it.
        send_scalars: Send what the client logs, such as its loss, to the server.
        shares: How frequent the classes are at the client, if its node states it: it is not sent.

    Raises:
        ValueError: If the method cannot be deployed.
    """

    def __init__(
        self,
        settings: run.Settings,
        fabric: Fabric,
        algorithm: FederatedAlgorithm,
        datamodule: FederatedDataModule,
        data: NodeData,
        folder: Path,
        send_scalars: bool = True,
        shares: SiteShares | None = None,
    ) -> None:
        refuse_undeployable(algorithm)
        self.settings = settings
        self.fabric = fabric
        self.algorithm = algorithm
        self.data = data
        self.folder = folder
        self.num_clients = datamodule.num_clients
        self.send_scalars = send_scalars
        self.shares = shares
        if not algorithm.freeze_patterns and not algorithm.personal_patterns:
            algorithm.init_from = None  # all weights come from the server
        setup.prepare_model(algorithm, datamodule, fabric, settings)
        weights = [*trained_weights(algorithm).values()]
        self.optimizer = build_optimizer(algorithm.optimizer, weights, "model.optimizer")

    def answer(self, kind: str, records: RecordDict) -> RecordDict:
        """The answer to a message of the server.

        Args:
            kind: ``describe``, ``moments`` or ``train``.
            records: The message.
        """
        tensors, order = read_order(records)
        data = self.data.local_data(order.get("round", 0), self.settings.dtype)
        if self.shares is not None:
            data = replace(data, shares=self.shares)
        values = {"client": self.data.client, "round": order.get("round", 0)}
        if kind == "describe":
            counts = {"labeled": len(data.labeled), "unlabeled": len(data.unlabeled)}
            return to_records({}, values | counts)
        self._begin_run(order["run"])
        work = self._train if kind == "train" else self._measure
        keys = self.settings
        with launch.settings(self.fabric.device, keys.deterministic, keys.precision):
            return work(order, tensors, data)

    def _begin_run(self, run: int) -> None:
        """Make the folder of a run, and remove those of other runs."""
        self._files = self.folder / f"client-{self.data.client}" / f"{run:016x}"
        self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in self._files.parent.iterdir():
            if other != self._files:
                shutil.rmtree(other)

    def _measure(self, order: Settings, tensors: State, data: LocalData) -> RecordDict:
        """Measure the client's moments.

        The weights stay here, as training may start from the same.
        """
        weights = remove_prefix(FOR_STATISTICS, tensors)
        self._save("weights", weights)
        load_state(self.algorithm, weights)
        with self.fabric.autocast():
            moments = measure_moments(self.algorithm, data, order["batch_size"])
        return to_records(pack_moments(moments), {"client": data.party, "round": order["round"]})

    def _train(self, order: Settings, received: State, data: LocalData) -> RecordDict:
        """Train the client, and store its state."""
        algorithm, fabric = self.algorithm, self.fabric
        client, number = data.party, data.round
        accepted = order["accepted"]
        result_names = order["result"]
        if order["holds_weights"]:
            received = {**(self._load("weights") or {}), **received}
        self._save(f"{number}-received", received)
        for file in self._files.glob("*-*"):
            if file.name.partition("-")[0] not in (str(accepted), str(number)):
                file.unlink()
        state = self._load(f"{accepted}-state") if accepted else {}
        if state is None:
            _log.warning(
                "round %d: client %d begins again without its state, which is lost",
                number,
                client,
            )
        algorithm.clients = ClientStore()
        algorithm.clients.load_state_dict({client: state or {}})
        before = self._load(f"{accepted}-received") if result_names and state is not None else None
        if before is not None and isinstance(algorithm, FedSHVR):
            result = select(add_prefix(LAST_ROUND, received) | received, result_names)
            self._begin_round(accepted, before)
            algorithm.on_result(client, fabric.to_device(result))
        model = exclude(received, result_names)
        self._begin_round(number, model)
        algorithm.logged.clear()
        server_side = _Received(fabric.to_device(model), algorithm.logged)
        phase = sequential.ClientPhase(
            algorithm,
            self.optimizer,
            fabric,
            server_side,
            self.settings.max_steps,
            server=server_side,
        )
        updates = sequential.train_clients(phase, [data])
        update = next(iter(updates), None)
        collector = MetricCollector()
        for name, value, weight, _ in algorithm.logged:
            collector.update(name, value, weight)
        for rule in self.settings.updates:
            update = update and rule.at_node(update, algorithm.server.model())
        algorithm.clients.commit(client)
        scalars = {name: pair for name, pair in collector.sums().items() if pair[1]}
        samples, steps = (update.num_samples, update.num_steps) if update else (0, 0)
        parts = [f"round {number}: client {client} made {steps} steps"]
        for name, (total, weight) in scalars.items():
            parts.append(f"{name} {total / weight:.4g}")
        _log.info(", ".join(parts))
        stored = algorithm.clients.state_dict().get(client, {})
        at_server = getattr(algorithm, "server_keeps", ())
        client_state = {
            name: t for name, t in stored.items() if name.partition(".")[0] not in at_server
        }
        self._save(f"{number}-state", client_state)
        values = {"client": client, "round": number, "num_samples": samples, "num_steps": steps}
        tensors_to_send: State = {}
        if update:
            tensors_to_send = {**update.model(), **named_payload(update.payload)}
        return to_records(tensors_to_send, values, scalars if self.send_scalars else {})

    def _begin_round(self, round_index: int, model: State) -> None:
        """Prepare the algorithm for a client in a round: the received model becomes the global
        model.
        """
        algorithm = self.algorithm
        server = algorithm.server
        max_rounds = self.settings.max_rounds
        server.update(select(model, server.model()))
        algorithm.set_learning_rates([self.optimizer], round_index, max_rounds)
        algorithm.current_round = Round(
            round_index,
            max_rounds,
            cohort=[self.data.client],
            num_clients=self.num_clients,
            client_lr=float(self.optimizer.param_groups[0]["lr"]),
        )

    def _save(self, name: str, tensors: State) -> None:
        """Store tensors in a file that only this user may read; one atomic operation."""
        separate = map_values(Tensor.contiguous, clone_state(tensors))  # no shared memory
        partial = self._files / f"{name}.partial"
        partial.touch(mode=0o600)
        partial.write_bytes(safetensors.torch.save(separate))
        os.replace(partial, self._files / name)

    def _load(self, name: str) -> State | None:
        """Stored tensors; None if they are not here, or cannot be read."""
        try:
            return safetensors.torch.load((self._files / name).read_bytes())
        except (OSError, safetensors.SafetensorError):
            return None


class NodeError(Exception):
    """A node cannot answer. The text, which the server gets, has only the kind of the error.

    The node's log has all.
    """


def make_client_app(
    make_node: Callable[[Settings, Settings], Node], mods: list[Any] | None = None
) -> ClientApp:
    """The ClientApp of a deployment. Flower starts a process for each message, which makes the node
    anew.

    Args:
        make_node: Makes the node from Flower's node configuration and run configuration.
        mods: Flower's modifiers of the messages that ask a client to train, such as ``LocalDpMod``.
    """
    app = ClientApp()

    def handler(kind: str) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                answer = make_node(context.node_config, context.run_config).answer(
                    kind, message.content
                )
                return Message(answer, reply_to=message)
            except Exception as error:
                # Flower sends the text of an exception to the server, and texts name files and
                # classes of the node.
                _log.exception("the node cannot answer a message (%s)", kind)
                raise NodeError(
                    f"{type(error).__name__}: see the log of node {context.node_id}"
                ) from None

        return handle

    app.train("client", mods=mods)(handler("train"))
    app.query("moments")(handler("moments"))
    app.query("describe")(handler("describe"))
    return app
