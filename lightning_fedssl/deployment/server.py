"""The server side of a deployment: ``fit`` with a federation whose clients train at
Flower's nodes.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from lightning_fedssl import sampling
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms import FedSHVR
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.deployment import Settings
from lightning_fedssl.deployment.messages import (
    FOR_STATISTICS,
    LAST_ROUND,
    MessageError,
    pack_moments,
    printable,
    read_answer,
    to_records,
    unpack_moments,
)
from lightning_fedssl.deployment.obstacles import refuse_callbacks, refuse_undeployable
from lightning_fedssl.deployment.own_data import ServerData
from lightning_fedssl.functional.averaging import State, sizes_of
from lightning_fedssl.functional.batch_norm import LayerMoments, local_moments
from lightning_fedssl.functional.dictionaries import (
    add_prefix,
    clone_state,
    exclude,
    remove_prefix,
    select,
    starting_with,
)
from lightning_fedssl.local_training.moments import measure_moments
from lightning_fedssl.run import Run
from lightning_fedssl.state import ClientUpdate, named_payload
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.trainer import FederatedTrainer
from lightning_fedssl.trainer.federation import RunFederation
from lightning_fedssl.updates.acceptance import check_update
from lightning_fedssl.updates.privacy import CentralDP

_log = logging.getLogger(__name__)

STATE = "deployment"
"""The kind of client state, and the entry of ``ServerState.extra``, in which the server stores its
progress."""

_RESULT = "result of round "
_TYPES = {"describe": "query.describe", "moments": "query.moments", "train": "train.client"}
_SCALARS = frozenset(
    {"client/loss", "client/mask_rate", "client/divergence", "client/from_teacher"}
)
"""What the methods log at clients; a method of one's own names others in its attribute
``client_scalars``."""
_MOST_IMAGES = 10**7

Parts = tuple[FederatedTrainer, FederatedAlgorithm, FederatedDataModule]
"""The trainer, algorithm and data that a configuration describes."""


class Nodes:
    """Flower's nodes, each with one client.

    A node that connects is asked which client it has. A client belongs to the first node that names
    it, until this node leaves; with ``bind`` for the whole run, which is for nodes with keys, whose
    numbers survive a restart.

    Args:
        grid: Flower's grid.
        num_clients: The number of all clients.
        deadline: Seconds that nodes have for an answer.
        connect_timeout: Seconds to wait for clients before a round.
        bind: See above.
        poll: Seconds between two looks at the grid while nodes connect.
    """

    ask_again = 60.0
    """Seconds after which a node is asked again that did not name a client of its own: its process
    may have failed, or the client's former node may have left."""

    def __init__(
        self,
        grid: Grid,
        num_clients: int,
        deadline: float,
        connect_timeout: float,
        bind: bool,
        poll: float = 1.0,
    ) -> None:
        self.grid = grid
        self.num_clients = num_clients
        self.deadline = deadline
        self.connect_timeout = connect_timeout
        self.bind = bind
        self.poll = poll
        self.sizes: dict[int, tuple[int, int]] = {}
        self._owner: dict[int, int] = {}
        self._asked: dict[str, int] = {}
        self._ask_at: dict[int, float] = {}

    def connected(self) -> dict[int, int]:
        """The clients whose nodes are connected now, with their nodes."""
        present = set(self.grid.get_node_ids())
        self._ask_at = select(self._ask_at, present)
        for node in sorted(present):
            if time.monotonic() >= self._ask_at.get(node, 0.0):
                question = Message(
                    to_records({}, {}), node, _TYPES["describe"], ttl=self.connect_timeout
                )
                (number,) = self.grid.push_messages([question])
                self._asked[number] = node
                self._ask_at[node] = math.inf
        for answer in self.grid.pull_messages(list(self._asked)) if self._asked else ():
            node = self._asked.pop(answer.metadata.reply_to_message_id)
            try:
                self._note(node, answer, present)
            except MessageError as error:
                self._ask_at[node] = time.monotonic() + self.ask_again
                _log.warning(
                    "a node does not name its client, and is asked again in %g s: %s",
                    self.ask_again, error,
                )  # fmt: skip
        return {client: node for client, node in sorted(self._owner.items()) if node in present}

    def _note(self, node: int, answer: Message, present: set[int]) -> None:
        """Note the client of a node, and how many labelled and unlabelled images it has.

        Raises:
            MessageError: If it is not a client of this run, has an impossible number of images, or
                is another node's.
        """
        (client, labeled, unlabeled), _, _ = read_answer(
            answer, ["client", "labeled", "unlabeled"], {}
        )
        if client >= self.num_clients or max(labeled, unlabeled) > _MOST_IMAGES:
            raise MessageError(f"it has client {client} with {labeled} and {unlabeled} images")
        owner = self._owner.setdefault(client, node)
        if owner != node and (self.bind or owner in present):
            raise MessageError(f"it has client {client}, which belongs to another node")
        self._owner[client], self.sizes[client] = node, (labeled, unlabeled)
        _log.info("the node of client %d has connected", client)

    def wait_for(self, clients: int) -> dict[int, int]:
        """Wait until so many clients are connected; these, with their nodes.

        Raises:
            TimeoutError: If this takes too long.
        """
        end = time.monotonic() + self.connect_timeout
        while len(connected := self.connected()) < clients:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"too few clients have connected in {self.connect_timeout:g} s (connected: "
                    f"{list(connected)}): start their SuperNodes, or raise connect-timeout"
                )
            time.sleep(self.poll)
        return connected

    def ask(self, kind: str, orders: Mapping[int, RecordDict]) -> dict[int, Message]:
        """Send a message to the nodes of some clients, and return the answers that arrive before
        the deadline.
        """
        nodes = self.connected()
        messages = {}
        for client, order in select(orders, nodes).items():
            messages[client] = Message(order, nodes[client], _TYPES[kind], ttl=self.deadline)
        answers = (
            self.grid.send_and_receive(list(messages.values()), timeout=self.deadline)
            if messages
            else ()
        )
        clients = {message.metadata.message_id: client for client, message in messages.items()}
        return {clients[answer.metadata.reply_to_message_id]: answer for answer in answers}


class DeployedFederation(RunFederation):
    """A server whose clients train at Flower's nodes.

    The rounds are those of the simulation with the same configuration, down to the random numbers.
    Clients whose nodes are not connected, fail or answer too late miss the round
    (``client/absent``); a message that cannot be used is rejected (``client/refused``), like an
    update that is not finite.

    Args:
        run: The run.
        nodes: Flower's nodes.
        wait_for: Clients that must be connected before the first round.
        min_clients: Clients that must be connected before a later round. If fewer have answered at
            the deadline, all clients miss the round.

    Raises:
        ValueError: If the method, a callback or a key of the trainer cannot be deployed.
    """

    simulated = False

    def __init__(self, run: Run, nodes: Nodes, wait_for: int = 1, min_clients: int = 1) -> None:
        super().__init__(run)
        refuse_undeployable(run.algorithm)
        refuse_callbacks(run.hooks.callbacks)
        if run.fabric.world_size > 1:
            raise ValueError(
                "trainer.devices gives several devices, but a deployment's server uses one: set "
                "it to 1"
            )
        if run.algorithm.personal and run.datamodule.label_location == "server":
            raise ValueError(
                "model.personal: in a deployment a client starts with its own first weights, not "
                "with those that the server has trained: leave it out, or give clients labels"
            )
        for rule in self.judge.rules:
            rule.on_deployment(min_clients)
        self.nodes = nodes
        self.min_clients = min_clients
        self._needed = wait_for
        self._held: dict[int, int] = {}
        self._moments_of_two: LayerMoments = {}

    def start_round(self) -> None:
        """Begin a round when enough clients are connected."""
        super().start_round()
        self._run_number()  # every checkpoint of a deployment has it, also if no client takes part
        connected = self.nodes.wait_for(self._needed)
        self._needed = self.min_clients
        if not connected.keys() & set(self.run.round.cohort):
            _log.warning(
                "round %d: no client of the cohort is connected: nobody trains in it",
                self.run.round.index,
            )

    def end_round(self) -> None:
        """Store the parts of the round's result that its clients need.

        Delete results that no client needs any more.
        """
        algorithm = self.run.algorithm
        extra = algorithm.server.extra
        if isinstance(algorithm, FedSHVR) and (result := algorithm.result_for_clients()):
            extra[f"{_RESULT}{self.run.round.index}"] = clone_state(result)
        waiting = set(map(self._accepted_round, range(self.run.datamodule.num_clients)))
        for name in starting_with(_RESULT, extra):
            if int(name.removeprefix(_RESULT)) not in waiting:
                del extra[name]

    def train_clients(self) -> Iterator[ClientUpdate]:
        """Let the nodes train the cohort; the updates are yielded in the order of the cohort."""
        clients = self.start_clients()
        self.run.scalars.count({"client/trained": 0.0})
        return self.judge.accepted(self._train_at_nodes(clients))

    def train_jointly(self) -> Iterator[ClientUpdate]:
        """No client of a deployment trains together with the server."""
        raise TypeError(f"{type(self.run.algorithm).__name__} cannot train at nodes")

    def reachable(self, clients: Sequence[int]) -> Sequence[int]:
        """Those whose nodes are connected."""
        connected = self.nodes.connected()
        return [client for client in clients if client in connected]

    def moments(
        self, parties: Sequence[int], batch_size: int
    ) -> Iterator[tuple[int, LayerMoments]]:
        """Measure the server's moments here; the nodes measure those of the clients."""
        run, algorithm = self.run, self.run.algorithm
        weights = add_prefix(FOR_STATISTICS, algorithm.server.parameters)
        orders = {
            party: to_records(weights, self._order(party, batch_size))
            for party in parties
            if party != sampling.SERVER
        }
        answers = self.nodes.ask("moments", orders)
        if not self._moments_of_two:
            images = torch.zeros((2, *(algorithm.in_shape or ())), dtype=run.settings.dtype)
            self._moments_of_two = local_moments(algorithm, [images.to(run.fabric.device)])
        for party in parties:
            if party == sampling.SERVER:
                yield party, measure_moments(algorithm, run.local_data(party), batch_size)
            elif party in answers:
                self._held[party] = algorithm.server.version
                try:
                    of_two = self._moments_of_two
                    _, tensors, _ = self._read(party, answers[party], pack_moments(of_two))
                    yield party, unpack_moments(tensors, of_two, self._images_of(party))
                except MessageError as error:
                    _log.warning(
                        "round %d: client %d: %s; statistics without it",
                        run.round.index,
                        party,
                        error,
                    )

    def _train_at_nodes(self, clients: Sequence[int]) -> Iterator[ClientUpdate]:
        count = self.run.scalars.count
        orders = {}
        for client in self.reachable(clients):
            tensors, values = self._message(client)
            self.transfer(client, "down", sizes_of(tensors))
            orders[client] = to_records(tensors, values)
        answers = self.nodes.ask("train", orders)
        failed = {client: a.error.reason for client, a in answers.items() if a.has_error()}
        answered = answers.keys() - failed
        if len(answered) < self.min_clients:
            answered = set()
        count({"client/absent": len(clients) - len(answered)})
        for client in clients:
            if client not in answered:
                _log.warning(
                    "round %d goes on without client %d: %s",
                    self.run.round.index,
                    client,
                    printable(failed.get(client, "too few answers")),
                )
                continue
            try:
                update = self._receive(client, answers[client])
            except MessageError as error:
                self.judge.settle(client, f"sent a message that cannot be used: {error}")
                continue
            if update is not None:
                count({"client/trained": 1.0, "client/images": float(update.num_samples)})
                yield update

    def _order(self, client: int, batch_size: int = 0) -> dict[str, Any]:
        return {
            "run": self._run_number(),
            "round": self.run.round.index,
            "accepted": self._accepted_round(client),
            "batch_size": batch_size,
            "holds_weights": False,
            "result": [],
        }

    def _message(self, client: int) -> tuple[State, dict[str, Any]]:
        """What asks a client to train: a model, and the result of its last round.

        A client may request further parts of the model once it has seen its broadcast. Here it gets
        them at once, as a further message would cost seconds. What it has received for its moments,
        and what is in the broadcast as the result of its last round, is not sent again.
        """
        algorithm = self.run.algorithm
        order = self._order(client)
        broadcast = self.judge.received[client] = algorithm.broadcast(client)
        counted = algorithm.download_sizes(client, broadcast)
        model = {**algorithm.server.model(), **broadcast}
        already_there = set()
        if self._held.get(client) == algorithm.server.version:
            already_there = broadcast.keys() - counted.keys()
        tensors = exclude(model, already_there)
        result = algorithm.server.extra.get(f"{_RESULT}{order['accepted']}", {})
        new = order["accepted"] < self.run.round.index - 1
        tensors |= {name: t for name, t in result.items() if new or not name.startswith(LAST_ROUND)}
        return tensors, order | {"holds_weights": bool(already_there), "result": list(result)}

    def _read(
        self, client: int, answer: Message, expected: State, *numbers: str
    ) -> tuple[list[int], State, Any]:
        """What :func:`read_answer` returns.

        Raises:
            MessageError: Also if the answer is not of this client in this round.
        """
        scalars = _SCALARS | set(getattr(self.run.algorithm, "client_scalars", ()))
        values, tensors, sums = read_answer(
            answer, ["client", "round", *numbers], expected, scalars
        )
        if values[:2] != [client, self.run.round.index]:
            raise MessageError(f"it is of client {values[0]} in round {values[1]}")
        return values[2:], self.run.fabric.to_device(tensors), sums

    def _receive(self, client: int, answer: Message) -> ClientUpdate | None:
        """The update of a client, with its state and scalars staged until it is accepted; None if
        it skips the round.

        Raises:
            MessageError: If the message is not what the algorithm expects.
        """
        algorithm = self.run.algorithm
        trained = algorithm.uploaded_weights()
        uploaded = algorithm.uploaded_buffers()
        payload = named_payload(getattr(algorithm, "client_payload", {}))
        expected = select(algorithm.server.model(), [*trained, *uploaded]) | payload
        (samples, steps), tensors, scalars = self._read(
            client, answer, expected, "num_samples", "num_steps"
        )
        if bool(tensors) != bool(steps):
            raise MessageError(f"it has {len(tensors)} tensors after {steps} steps")
        update = None
        if steps:
            parameters, buffers = select(tensors, trained), select(tensors, uploaded)
            further = remove_prefix("payload.", select(tensors, payload))
            update = ClientUpdate(client, parameters, buffers, samples, steps, further)
            if reason := check_update(algorithm, update, *self._most(client)):
                raise MessageError(f"it {reason}")
        with algorithm.clients.stage(client):
            done = torch.tensor(self.run.round.index)
            algorithm.clients.put(client, STATE, {"accepted": done})
            for name, (total, weight) in scalars.items():
                algorithm.log(name, total / weight, batch_size=weight)
            if update is not None:
                self.transfer(client, "up", algorithm.upload_sizes(update))
                self.run.hooks.call("on_client_end", update)
        if update is None:
            self.judge.settle(client, None)
        return update

    def _most(self, client: int) -> tuple[int, int]:
        """The numbers of images and of steps that a client can have trained on and
        made in a round.
        """
        algorithm = self.run.algorithm
        images = self._images_of(client)
        batches = math.ceil(images / self.run.datamodule.client_batch_size)
        steps = max(1, batches * math.ceil(algorithm.client_epochs))
        return images, algorithm.hparams.get("client_steps") or steps

    def _images_of(self, client: int) -> int:
        return self._client_sizes[client] or sum(self.nodes.sizes.get(client, ()))

    # What the server remembers, in every checkpoint.

    def _accepted_round(self, client: int) -> int:
        """The last round whose update of a client was accepted, or which the client skipped; 0 for
        none.
        """
        progress = self.run.algorithm.clients.get(client, STATE)
        return int(progress["accepted"]) if progress else 0

    def _run_number(self) -> int:
        """A random number of the run, which a resumed run has too."""
        extra = self.run.algorithm.server.extra
        return int(extra.setdefault(STATE, {"run": torch.tensor(secrets.randbits(62))})["run"])


def make_server_app(make_parts: Callable[[Settings], Parts]) -> ServerApp:
    """The ServerApp of a deployment.

    Args:
        make_parts: Makes trainer, algorithm and data from Flower's run configuration.
    """
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        """Train; resume the last run if it has not finished."""
        fit_on_grid(grid, context.run_config, make_parts(context.run_config))

    return app


def fit_on_grid(grid: Grid, run_config: Settings, parts: Parts) -> None:
    """Train with the nodes of a grid.

    Args:
        grid: Flower's grid.
        run_config: The keys ``wait-for-clients`` (0: all), ``min-clients``, ``round-deadline`` and
            ``connect-timeout`` in seconds, ``bind-clients`` and ``resume``.
        parts: Trainer, algorithm and data.

    Raises:
        ValueError: If another server trains below the same ``default_root_dir``.
        TimeoutError: If too few clients connect.
    """
    trainer, algorithm, datamodule = parts
    nodes = Nodes(
        grid,
        datamodule.num_clients,
        deadline=float(run_config.get("round-deadline", 600)),
        connect_timeout=float(run_config.get("connect-timeout", 3600)),
        bind=bool(run_config.get("bind-clients", False)),
    )
    wait_for = int(run_config.get("wait-for-clients", 0)) or datamodule.num_clients
    root = Path(trainer.default_root_dir)
    root.mkdir(parents=True, exist_ok=True)

    def make_federation(run: Run) -> DeployedFederation:
        return DeployedFederation(run, nodes, wait_for, int(run_config.get("min-clients", 1)))

    try:
        with FileLock(root / ".deployment.lock", timeout=0):
            ckpt_path = unfinished(trainer, algorithm) if run_config.get("resume", True) else None
            if isinstance(datamodule, ServerData):
                nodes.wait_for(wait_for)
                datamodule.client_sizes = nodes.sizes
            trainer.fit(algorithm, datamodule, ckpt_path, make_federation)
    except Timeout as error:
        raise ValueError(
            f"a server is training in {root} now: wait for its end, or end it with flwr stop"
        ) from error
    accuracy = trainer.callback_metrics.get("test/accuracy")
    if accuracy is not None:  # a run that a signal has stopped has none
        # A line of its own, so that it can be found in the log of the server.
        print(f"test/accuracy {float(accuracy):.4f}", flush=True)


def unfinished(trainer: FederatedTrainer, algorithm: FederatedAlgorithm) -> Path | None:
    """The last checkpoint below ``default_root_dir``, whose run goes on; None if a new run begins.

    A new run begins if there is none, or if the newest has finished. It never takes the place of a
    run that cannot be resumed: with privacy, it would spend a second budget.

    Args:
        trainer: The run.
        algorithm: The method.

    Raises:
        ValueError: If there is a run that cannot be resumed.
    """
    root = Path(trainer.default_root_dir)
    remedy = "give trainer.default_root_dir another folder, or resume=false to begin a new run"
    try:
        path = checkpoint_file.find("last", root)
    except FileNotFoundError:
        if trained := sorted(root.glob("lightning_logs/version_*/metrics.csv")):
            raise ValueError(
                f"the run of {trained[-1].parent} has trained and has no last.ckpt, so it cannot "
                f"be resumed: {remedy}"
            ) from None
        _log.info("a new run begins: there is none below %s", root.resolve())
        return None
    checkpoint = checkpoint_file.load(path)
    kind = "deployment" if STATE in checkpoint["federation"]["extra"] else "simulation"
    expected = f"deployment of {type(algorithm).__name__}"
    saved = f"{kind} of {checkpoint['algorithm']}"
    if saved != expected:
        raise ValueError(
            f"the newest run below {root}, that of {path}, is a {saved}, so a {expected} cannot "
            f"resume it: {remedy}"
        )
    if checkpoint["round"] >= trainer.max_rounds and _is_tested(
        path.parent.with_name("result.json")
    ):
        private = any(isinstance(rule, CentralDP) for rule in trainer.updates)
        budget = ", which spends a privacy budget of its own" if private else ""
        _log.info("a new run begins%s: that of %s has finished", budget, path)
        return None
    _log.info("resuming %s after round %d of %d", path, checkpoint["round"], trainer.max_rounds)
    return path


def _is_tested(result: Path) -> bool:
    """Whether a run has written its result, which it does after the test.

    A file that a full disk or an earlier version has cut is none: the run is tested again.
    """
    with suppress(OSError, ValueError, LookupError, TypeError):
        return not json.loads(result.read_text("utf-8"))["interrupted"]
    return False
