"""Semi-supervised split federated learning: the pipeline that Semi-SFL and FedSwitch-SL share.

The clients hold the bottom of a network, the server its top and the labels. A round:

1. the server trains the whole network for K_s steps on its labelled images; after every step a
   teacher follows the network as a moving average (``EMATeacher``);
2. the bottoms of network and teacher are sent to the drawn clients;
3. K_u times: every client sends student features of a strong view and teacher features of a weak
   view of a batch; the server labels the images, makes one step of its part on the features of all
   clients together, and sends each client the gradient of its own features; each client makes a
   step of its bottom;
4. the new bottom is the mean of the clients' ones, buffers included. The teacher stays as it is.

The global teacher is what is evaluated. Source: Z. Sun et al., arXiv 2307.15870, and the authors'
code.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from lightning_fedssl.algorithm import JointAlgorithm
from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.data.local_data import LocalData, Visits
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.dictionaries import remove_prefix, starting_with, tensors_of
from lightning_fedssl.functional.ema import ema_update
from lightning_fedssl.functional.optimizers import nesterov_sgd
from lightning_fedssl.functional.schedules import Cosine, Schedule
from lightning_fedssl.local_work import LocalWork, epochs_of, infinite_shuffle, one_pass
from lightning_fedssl.models.split import SplitNetwork, split
from lightning_fedssl.models.teacher import Teacher
from lightning_fedssl.state import Batch, ClientUpdate
from lightning_fedssl.storage.hyperparameters import hyperparameters

if TYPE_CHECKING:
    from lightning_fedssl.round import Federation

_AT_CLIENTS = ("network.bottom.", "teacher.network.bottom.")
_TEACHER = "teacher."
START_ADAPTIVE = 80


class _TrainsSplitNetwork(JointAlgorithm):
    network: SplitNetwork


@hyperparameters
class SplitTraining(_TrainsSplitNetwork):
    """The base class of the methods: the shared pipeline, with cross-entropy on labelled images at
    the server.

    Args:
        split: Where the network is split: the number of layers with weights at the clients, or the
            name of their last layer (:func:`lightning_fedssl.models.split.split`).
        server_steps: K_s, steps of the server in a round; null: adapted by
            ``GlobalUpdateFrequency``.
        client_steps: K_u, steps that clients and server make together in a round; 0 for supervised
            training alone.
        threshold: tau, the confidence from which a pseudo-label is used (inclusive).
        teacher_decay: gamma, the largest decay of the teacher; at the server's t-th step of the run
            it is ``min(1 - 1/(t + 1), gamma)``.
        client_teacher_decay: Decay of the clients' teacher bottoms, which follow their students at
            every step (Eq. 8); null: they do not change during local training.
        server_views: Views of the labelled images.
        pretrain_rounds: Rounds of supervised training alone before the clients take part.
        optimizer: The optimizer of server and clients; its state is reset at every stage.
        schedule: The learning rate over the rounds; by default a cosine from 1 to a quarter.
        client_weighting: A client's weight in the mean of the bottoms.
    """

    labels_at = "server"
    needs_unlabeled = True
    no_static_batch_norm = checks.HAS_TEACHER

    split: int | str = 2
    server_steps: int | None = None
    client_steps: int = 50
    threshold: float = 0.95
    teacher_decay: float = 0.99
    client_teacher_decay: float | None = None
    server_views: Literal["weak", "strong"] = "weak"
    pretrain_rounds: int = 0
    optimizer: OptimizerCallable = nesterov_sgd
    client_weighting: Literal["samples", "uniform"] = "uniform"

    def default_schedule(self) -> Schedule:
        """A cosine from 1 to a quarter."""
        return Cosine(final=0.25)

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.refuse_epochs(self, "set model.server_steps (K_s) and model.client_steps (K_u)")
        checks.at_least(self, 1, "server_steps")
        checks.at_least(self, 0, "client_steps", "pretrain_rounds")
        checks.probability(self, "threshold")
        checks.decay(self, "client_teacher_decay")
        self.adapts_server_steps = self.server_steps is None
        self.server_steps = START_ADAPTIVE if self.server_steps is None else self.server_steps

    def configure_callbacks(self) -> list[Callback]:
        """Update the teacher, and adapt K_s if it is not given."""
        from lightning_fedssl.callbacks import EMATeacher, GlobalUpdateFrequency

        adaptation = [GlobalUpdateFrequency(START_ADAPTIVE)] if self.adapts_server_steps else []
        return [EMATeacher(self.teacher_decay), *adaptation]

    # The network, its parts and its teacher.

    def build_parts(self) -> None:
        """Split the network, and copy it for the teacher."""
        self.network = split(self.network, self.split)
        if not any(weight.requires_grad for weight in self.network.bottom.parameters()):
            raise ValueError(
                f"model.freeze selects every weight before model.split {self.split!r}, so that "
                "clients have nothing to train: freeze fewer layers, or split the network at a "
                "later one"
            )
        self.build_head()
        self.teacher = Teacher(self.students())

    def configured_network(self) -> nn.Module:
        """The network before the split; it shares its layers with the two parts."""
        return self.network.whole.eval()

    def build_head(self) -> None:
        """Build the modules that a method has at the server in addition to the network."""

    def students(self) -> dict[str, nn.Module]:
        """The modules that the teacher copies, by name."""
        return {"network": self.network}

    @property
    def teacher_bottom(self) -> nn.Module:
        """The teacher's bottom, w~_c."""
        return cast(SplitNetwork, self.teacher["network"]).bottom

    @property
    def teacher_top(self) -> nn.Module:
        """The teacher's top, w~_s."""
        return cast(SplitNetwork, self.teacher["network"]).top

    def embed(self, x: Tensor) -> Tensor:
        """Features ``(batch, dimension)`` of images: the flattened output of the working module's
        bottom.
        """
        features: Tensor = self.network.bottom(x)
        return features.flatten(1)

    def at_clients(self, name: str) -> bool:
        """Whether a tensor belongs to the bottom of network or teacher: each client has a copy of
        it.
        """
        return name.startswith(_AT_CLIENTS)

    def broadcast(self, client: int) -> State:
        """The bottoms of network and teacher."""
        return {name: t for name, t in self.server.model().items() if self.at_clients(name)}

    def uploaded_buffers(self) -> list[str]:
        """The buffers of the student's bottom."""
        return [name for name in super().uploaded_buffers() if name.startswith(_AT_CLIENTS[0])]

    def evaluated_model(self) -> State:
        """The global teacher, also under the names of the network."""
        teacher = starting_with(_TEACHER, self.server.model())
        return {**teacher, **remove_prefix(_TEACHER, teacher)}

    # Stage 1, at the server.

    def on_server_start(self, data: LocalData) -> LocalWork:
        """K_s batches of labelled images, in two views each."""
        view = data.weak if self.server_views == "weak" else data.strong

        def make_batch(rows: Tensor, visits: Visits) -> Batch:
            images = data.labeled[rows]
            return {
                "x": view(images, "view 1", visits=visits),
                "x_key": view(images, "view 2", visits=visits),
                "y": data.labels[rows],
            }

        count = len(data.labeled)
        order = partial(data.permutation, count, "labeled")
        return epochs_of(data, make_batch, order, count, steps=self.server_steps)

    def server_training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Cross-entropy of the first view (Eq. 4 without T)."""
        return self.task.labeled_loss(self(batch["x"]), batch["y"])

    # Stage 2, at the clients.

    def on_client_start(self, data: LocalData) -> LocalWork:
        """K_u full batches of the client's images.

        They continue where the client's last round ended.
        """
        count = len(data.unlabeled)
        place = self.clients.get(data.party, "place").get("steps")
        done = 0 if place is None else int(place)
        first = done * data.batch_size
        visits = self.client_steps * data.batch_size
        rows = infinite_shuffle(data, first, visits) if count else data.unlabeled

        def make_batch(rows: Tensor, visits: Visits) -> Batch:
            images = data.unlabeled[rows]
            start = visits.spans[0].start
            return {
                "index": images,
                "x_weak": data.weak(images, "weak", start=start),
                "x_strong": data.strong(images, "strong", start=start),
            }

        work = one_pass(data, make_batch, rows)
        # Its images, not their visits, which are as many at every client.
        return replace(work, num_samples=count if len(rows) else 0)

    def client_features(self, batch: Batch, batch_idx: int) -> State:
        """Student features of the strong view, teacher features of the weak one."""
        if self.client_teacher_decay is not None and batch_idx:
            student, teacher = map(tensors_of, (self.network.bottom, self.teacher_bottom))
            that_change = {
                n: t for n, t in teacher.items() if f"{_AT_CLIENTS[0]}{n}" in self.server.model()
            }
            ema_update(that_change, student, self.client_teacher_decay)
        return {
            "student": self.network.bottom(batch["x_strong"]),
            "teacher": self.teacher_features(batch),
        }

    @torch.no_grad()
    def teacher_features(self, batch: Batch) -> Tensor:
        """Features of the weak view, from which the server computes pseudo-labels: ``(batch,
        ...)``.
        """
        features: Tensor = self.teacher_bottom(batch["x_weak"])
        return features

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        """Store the client's number of steps in all rounds, from which its next round continues."""
        place = self.clients.get(update.client, "place").get(
            "steps", torch.zeros((), dtype=torch.int64)
        )
        self.clients.put(update.client, "place", {"steps": place + update.num_steps})
        return update

    def round(self, federation: Federation) -> None:
        """Train the server; then, after the pretraining, clients and server together."""
        federation.train_server()
        if self.client_steps and self.current_round.index > self.pretrain_rounds:
            self.aggregate(self.accumulate(federation.train_jointly()))
