"""The base class of all algorithms: federated averaging, divided into functions that an algorithm
may override.

An algorithm overrides the smallest function that its paper changes::

    training_step          the loss of a client's batch
    server_training_step   the loss of a server's batch
    on_client_start        what a client prepares (pseudo-labels, batches); without steps, it
                           skips the round
    on_client_end          what a client adds to its update, and the state that it stores
    client_weight          the weight of an update in the average
    broadcast              what one client receives
    accumulate             what is summed over the clients
    aggregate              the new global model, computed from the sums
    round                  the order of these steps

``self.current_round`` is the present round (:class:`~lightning_fedssl.round.Round`: its number,
learning rate, cohort, ...), and ``self.federation`` what a method may ask for in it
(:class:`~lightning_fedssl.round.Federation`). ``self.server`` is the state of the server,
``self.clients`` the persistent state of the clients. The page ``docs/adding_a_method.md`` shows
complete methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedssl import sampling
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import Sizes, State, Sums, WeightedSum, sizes_of
from lightning_fedssl.functional.batch_norm import has_static_batch_norm
from lightning_fedssl.functional.dictionaries import exclude, select
from lightning_fedssl.functional.frozen import freeze as freeze_weights
from lightning_fedssl.functional.frozen import personal_names, trained_weights
from lightning_fedssl.functional.optimizer_states import set_learning_rate
from lightning_fedssl.functional.optimizers import sgd
from lightning_fedssl.functional.pseudo_labels import PseudoLabels
from lightning_fedssl.functional.schedules import Constant, Schedule
from lightning_fedssl.local_work import LocalWork, labeled_work
from lightning_fedssl.metrics.rounds import Logged
from lightning_fedssl.models import NetworkFactory, StaticBatchNorm2d, build_network
from lightning_fedssl.models.head import LinearAnswer, linear_targets, start_head
from lightning_fedssl.models.pretrained import load_weights
from lightning_fedssl.round import Federation, Round
from lightning_fedssl.state import Batch, ClientStore, ClientUpdate, ServerState, is_local
from lightning_fedssl.storage import checkpoint_file
from lightning_fedssl.storage.hyperparameters import (
    hyperparameters,
    patterns,
    require,
    require_factory,
)
from lightning_fedssl.storage.named_value import arguments_of, made
from lightning_fedssl.storage.other_names import NamesKeys
from lightning_fedssl.task import Classification, Need, Task

if TYPE_CHECKING:
    from typing_extensions import Self

    from lightning_fedssl.data.datamodule import FederatedDataModule


MOST_EPOCHS = 1e6
"""Epochs of a party in a round at most: a larger number is a mistake, and its steps could not be
counted."""


Place = Literal["server", "clients"]
"""Who has the labels."""


class _Attributes(LightningModule):
    """The attributes that are not arguments of the constructor, or are of another type."""

    local_modules: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[Need] = "one class"
    labels_at: ClassVar[Place | None] = None
    needs_unlabeled: bool = False
    uses_class_shares: bool = False
    no_static_batch_norm: ClassVar[str] = ""
    trains_clients: ClassVar[bool] = True
    not_deployable: ClassVar[str] = ""
    no_personal: ClassVar[str] = ""
    steps_per_round: int | None = None
    statistics_of: Literal["server", "moments"] = "moments"
    clients_use_statistics: bool = False
    same_step_every_round: ClassVar[bool] = False
    task: Task
    federation: Federation
    server: ServerState
    network: nn.Module
    schedule: Schedule
    personal: Sequence[str]


@hyperparameters
class FederatedAlgorithm(_Attributes, metaclass=NamesKeys):
    """Federated averaging with optional training at the server after it.

    The base class of all algorithms.

    The optimizers and the learning rate are the arguments ``optimizer``, ``server_optimizer`` and
    ``schedule``, not what ``configure_optimizers`` returns: every party has an optimizer of its
    own.

    Args:
        network: The network to train. ``num_classes`` and the input shape are filled in from the
            data.
        optimizer: The optimizer of a client's steps.
        server_optimizer: The optimizer of the server's steps; ``optimizer`` if left out.
        schedule: The learning rate over the rounds, for clients and server alike.
        client_epochs: E, local epochs of a client in a round; below 1 a fraction of an epoch, at
            least one step.
        server_epochs: Epochs of the server over its labelled images in a round; 0 for no server
            training.
        client_weighting: A client's weight in the mean: its number of ``samples``, or ``uniform``.
        gradient_clip_norm: Largest L2 norm of a gradient, at clients and server; larger gradients
            are scaled down. No clipping if left out.
        keep_client_optimizer: The optimizer state of a client (momentum) persists until the client
            is drawn again. It costs the size of a model per client.
        keep_server_optimizer: The optimizer state of the server persists between rounds.
        init_from: A file with the initial weights of the network: safetensors, a checkpoint, or a
            saved ``state_dict`` (:func:`~lightning_fedssl.models.pretrained.load_weights`). Left
            out: random weights.
        init_except: Names or patterns of tensors that ``init_from`` leaves as they are, such as
            ``[classifier]`` where the file is of other classes.
        init_head: The weights that the classifier, the last linear layer, starts with: ``random``;
            ``zero``; or ``labels``: the best linear answer to the server's labels, logistic or
            ridge regression on what the classifier receives
            (:func:`~lightning_fedssl.models.head.start_head`).
        freeze: Names or patterns of layers or weights that are not trained, such as ``["*",
            "!classifier"]``. Every party has them before the run: they are neither sent nor
            averaged (:func:`~lightning_fedssl.functional.frozen.freeze`).
        personal: Names or patterns of layers or weights that each client keeps for itself, such as
            ``classifier`` (FedPer, arXiv 1912.00818) or ``*norm*`` (FedBN, arXiv 2102.07623): they
            are neither sent nor averaged. The server has its own, which new clients start with,
            and with which the global model is evaluated.
        num_classes: Number of classes; taken from the data if left out.
        in_shape: (channels, height, width) of an image; taken from the data if left out.
        task: What is predicted; taken from the data.

    Attributes:
        needs: What the method needs of a task; a trainer refuses data whose task does not give it.
        task: What is predicted, with its losses and labels; a trainer takes it from the data.
        current_round: The present round of the run.
        federation: What the method may ask of the run; a trainer sets it.
        logged: What :meth:`log` was called with, until the run adds it to the scalars of the round.
        server: The state of the server: the global model, and what a method stores there.
        clients: The persistent states of the clients.
        network: The network, once ``configure_model`` has built it.
        linear_answer: What ``init_head: labels`` has found, before the first round.
        local_modules: Names of modules that a client needs in its round only, such as a local
            teacher. They are not part of the global model: they are not sent, averaged, evaluated
            or saved. ``on_client_start`` sets them.
        labels_at: Who must have the labels, ``server`` or ``clients``; None: either may.
        needs_unlabeled: Whether clients must have samples without labels.
        uses_class_shares: Whether clients label their samples by what ``data.class_shares`` states.
        no_static_batch_norm: Why the network cannot have static batch norm, whose statistics are
            measured for the global model alone, as a clause; empty if it can.
        trains_clients: Whether clients train at all.
        not_deployable: Why clients cannot train on machines of their own, with the method as the
            subject: "sends clients the models of other clients"; empty if they can.
        no_personal: Why clients cannot keep weights for themselves, with the method as the subject;
            empty if they can.
        personal: The names of the weights and buffers that each client keeps, once
            ``configure_model`` has built the network.
        steps_per_round: T, if clients and server all make T steps in a round; the schedule then
            sets the rate of each step. With None the rate is constant within a round.
        statistics_of: The images on which the statistics of static batch norm are measured, as
            :class:`~lightning_fedssl.callbacks.StaticBatchNorm` names them.
        clients_use_statistics: Whether clients evaluate the network that they receive, as to label
            images. Then the statistics of static batch norm are measured before every round, and
            otherwise only for an evaluation.
        same_step_every_round: Whether ``training_step`` reads nothing but its batch, the module's
            weights and buffers, the global weights, and attributes that do not change after the
            run has begun. Then a GPU records the steps of stacked clients once for the run, and
            otherwise once a round. It is not inherited: a class that changes the step says it
            again.
    """

    network: InitVar[NetworkFactory]
    optimizer: OptimizerCallable = sgd
    server_optimizer: OptimizerCallable | None = None
    schedule: InitVar[Schedule | None] = None
    client_epochs: float = 1
    server_epochs: float = 0
    client_weighting: Literal["samples", "uniform"] = "samples"
    gradient_clip_norm: float | None = None
    keep_client_optimizer: bool = False
    keep_server_optimizer: bool = False
    init_from: str | Path | None = None
    init_except: Sequence[str] | str = ()
    init_head: Literal["random", "zero", "labels"] = "random"
    freeze: InitVar[Sequence[str] | str] = ()
    personal: InitVar[Sequence[str] | str] = ()
    num_classes: int | None = None
    in_shape: tuple[int, ...] | None = None
    task: InitVar[Task | None] = None

    def __post_init__(
        self,
        network: NetworkFactory,
        schedule: Schedule | None,
        freeze: Sequence[str] | str,
        personal: Sequence[str] | str,
        task: Task | None,
    ) -> None:
        super().__init__()
        require_factory("optimizer", self.optimizer)
        require_factory("server_optimizer", self.server_optimizer)
        # Module.__setattr__ would register a built network as a layer.
        vars(self)["network_factory"] = network
        self.network_factory: NetworkFactory
        self.task = task or Classification()
        self.schedule = schedule or self.default_schedule()
        self.freeze_patterns = patterns(freeze)
        self.personal_patterns = patterns(personal)
        self.personal = ()
        self.clients = ClientStore()
        self.logged: list[Logged] = []
        self.current_round = Round()
        self.step_factors: Sequence[float] = ()
        self.linear_answer: LinearAnswer | None = None
        # The data that the model was trained on; see trainer/checkpointing.py.
        self.origin: Mapping[str, Any] = {}
        self.check_arguments()

    def default_schedule(self) -> Schedule:
        """The learning rate over the rounds if ``schedule`` is left out."""
        return Constant()

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them; called once, by the constructor.

        Raises:
            ValueError: Names the argument, its value and what to give.
        """
        epochs = self.client_epochs
        fits = 0 < epochs <= MOST_EPOCHS
        require(fits, "client_epochs", epochs, "give a finite number above 0")
        epochs = self.server_epochs
        fits = 0 <= epochs <= MOST_EPOCHS
        require(fits, "server_epochs", epochs, "give 0 (no server training) or more")
        clip = self.gradient_clip_norm
        fits = clip is None or clip > 0
        require(fits, "gradient_clip_norm", clip, "give a number above 0, or null for none")
        left_out = self.init_except
        fits = self.init_from is not None or not left_out
        require(fits, "init_except", left_out, "it needs model.init_from")
        patterns = self.personal_patterns
        remedy = f"{type(self).__name__} {self.no_personal}: leave it out"
        require(not (patterns and self.no_personal), "personal", patterns, remedy)

    @property
    def lightning_module(self) -> LightningModule:
        """What Lightning's own callbacks see."""
        return self

    @property
    def trainer(self) -> Any:
        """The :class:`~lightning_fedssl.trainer.FederatedTrainer` of the run."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        if isinstance(trainer, Trainer):
            raise TypeError(
                f"{type(self).__name__} is trained by "
                "lightning_fedssl.FederatedTrainer().fit(...), not by Lightning's Trainer, which "
                "knows no clients"
            )
        LightningModule.trainer.__set__(self, trainer)  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        """The state without the federation, which belongs to one process and one run."""
        state = super().__getstate__()
        state.pop("federation", None)
        return state

    def configure_model(self) -> None:
        """Build the network, with weights that are a function of the seed or of a file.

        Do nothing if it exists.
        """
        if hasattr(self, "network"):
            return
        if self.num_classes is None or self.in_shape is None:
            raise ValueError(
                "model.num_classes and model.in_shape are not known yet: a trainer takes them "
                "from the data"
            )
        in_shape = (*self.in_shape,)
        out_shape = self.task.output_shape(self.num_classes, in_shape)
        with sampling.seeded("initial weights"):
            self.network = build_network(self.network_factory, out_shape[0], in_shape, out_shape)
        if self.init_from is not None:
            load_weights(self.network, self.init_from, patterns(self.init_except))
        freeze_weights(self.network, self.freeze_patterns, "model.freeze")
        self.personal = personal_names(self.network, self.personal_patterns)
        if self.no_static_batch_norm and has_static_batch_norm(self.network):
            raise ValueError(
                f"model.network has norm static_batch, but {self.no_static_batch_norm}: give norm "
                "batch, group or none"
            )
        self.build_parts()

    @classmethod
    def like(cls, method: FederatedAlgorithm, **others: Any) -> Self:
        """A method of this class with the network, initial weights, optimizers and schedule of
        another.

        Args:
            method: The other method.
            others: Further arguments.
        """
        names = ("schedule", "gradient_clip_norm", "init_from", "init_except", "init_head")
        shared = {name: getattr(method, name) for name in names}
        other = cls(network=nn.Identity, freeze=method.freeze_patterns, **shared, **others)
        # Not as arguments: the constructor copies those, and a parser's factories cannot be copied.
        vars(other)["network_factory"] = method.network_factory
        other.optimizer, other.server_optimizer = method.optimizer, method.server_optimizer
        other.hparams["network"] = method.hparams["network"]
        return other

    def anew(self) -> FederatedAlgorithm:
        """The same method before a run, to train it again on other samples (``LabelsAlone``).

        Raises:
            NotImplementedError: The method does not.
        """
        raise NotImplementedError

    def build_parts(self) -> None:
        """Build what a method has in addition to the network, such as a teacher; called once."""

    def check_data(self, data: FederatedDataModule) -> None:
        """Refuse data that the method cannot train on.

        Raises:
            ValueError: Names the key to change.
        """
        name = type(self).__name__
        place = self.labels_at
        if place not in (None, data.label_location):
            raise ValueError(
                f"{name} trains on labels of the {place}: set data.label_location to {place}"
            )
        if self.needs_unlabeled and not any(len(client.unlabeled) for client in data.split.clients):
            raise ValueError(f"{name} needs unlabelled data at the clients: lower data.num_labels")
        if data.class_shares is not None and self.trains_clients and not self.uses_class_shares:
            raise ValueError(
                f"data.class_shares: {name} does not use what sites know of their classes; leave "
                "it out, or take SelfTraining, SemiFL, FL2, FixMatch, UDA or SAGE"
            )

    def on_run_start(self, data: LocalData) -> None:
        """Set what a new run begins with, before its first round: the classifier.

        Args:
            data: The server's, with its labels.
        """
        if self.init_head != "random":
            fitted = self.init_head == "labels"
            remedy = "a classifier of pixels is not a linear layer; give random or zero"
            require(not self.task.per_pixel, "init_head", self.init_head, remedy)
            batches = map(data.plain, data.labeled.split(data.chunk))
            labels = linear_targets(self.task, data.labels) if fitted else None
            self.linear_answer = start_head(self.network, self.num_classes or 1, batches, labels)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of images ``(batch, channels, height, width)``, in 32 bits or
        more.
        """
        logits: Tensor = self.network(x)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    # What a client does.

    def broadcast(self, client: int) -> State:
        """What one client downloads: by default the global weights and buffers."""
        return self.server.model()

    def download_sizes(self, client: int, received: State) -> Sizes:
        """Bytes of each tensor of a client's download, by name, without tensors that the client
        already has.

        Args:
            client: The client.
            received: Its broadcast.
        """
        if self.server.last_broadcast_version == self.server.version:
            global_weights = self.server.parameters
            received = {
                name: t for name, t in received.items() if global_weights.get(name) is not t
            }
        return sizes_of(received)

    def upload_sizes(self, update: ClientUpdate) -> Sizes:
        """Bytes of each tensor of a client's upload, by name: by default all of the update."""
        return update.sizes()

    def payload_limits(self, update: ClientUpdate) -> Mapping[str, tuple[Any, Any]]:
        """The smallest and the largest possible value of each tensor of an update's payload, by
        name.

        The server rejects updates with other values. A tensor that is not named must be finite.

        Args:
            update: Its ``payload`` may be a lie.
        """
        return {}

    def on_client_start(self, data: LocalData) -> LocalWork:
        """What a client does in this round. A client without steps skips the round.

        The working module holds the broadcast. By default a client trains on its labelled images.
        Several clients may start before the first of them ends. Therefore a value for
        ``on_client_end`` must be in ``LocalWork.payload``, not in an attribute.
        """
        return labeled_work(data, self.client_epochs)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """The loss of a client's batch.

        None skips the batch. By default the task's loss on labelled images: cross-entropy.

        As in Lightning it may also be in a dictionary, as ``{"loss": loss}``. Attributes must not
        be changed: clients that train together (``trainer.clients_at_once``) share them.

        Args:
            batch: The tensors of a step.
            batch_idx: The step, from 0.
        """
        return self.task.labeled_loss(self(batch["x"]), batch["y"])

    def own_part(self, client: int) -> State:
        """The personal weights and buffers of a client; before its first round the server's."""
        return self.clients.get(client, "personal") or self.server.personal

    def state_owner(self, client: int) -> int:
        """The number under which ``self.clients`` stores a client's optimizer state: by default the
        client's.
        """
        return client

    def on_client_end(self, update: ClientUpdate) -> ClientUpdate:
        """The update as it is sent: a method may change it, and may store state of the client in
        ``self.clients``.

        The working module holds the client's result. The state is stored only if the server accepts
        the update.
        """
        return update

    def set_learning_rates(
        self, optimizers: Iterable[Optimizer], round_index: int, max_rounds: int
    ) -> None:
        """Set the learning rate of a round, and the factors of its steps if it has any.

        Args:
            optimizers: Those of clients and server.
            round_index: The round, from 1.
            max_rounds: The length of the run in rounds.
        """
        factor = self.schedule.checked_factor
        steps = self.steps_per_round or 0
        self.step_factors = [
            factor(round_index + step / steps, max_rounds) for step in range(steps)
        ]
        for optimizer in optimizers:
            set_learning_rate(optimizer, factor(round_index, max_rounds))

    # What the server does.

    def on_round_start(self) -> None:
        """Prepare a round before its training: set values that change once per round, or check
        them.
        """

    def on_server_start(self, data: LocalData) -> LocalWork:
        """The local work of the server: by default epochs on its labelled images."""
        return labeled_work(data, self.server_epochs)

    def server_training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """The loss of a server's batch: the task's, on labelled images."""
        return self.task.labeled_loss(self(batch["x"]), batch["y"])

    def client_weight(self, update: ClientUpdate) -> float:
        """The weight of an update in the average: its number of images, or 1 with
        ``client_weighting: uniform``.
        """
        return update.num_samples if self.client_weighting == "samples" else 1.0

    def accumulate(self, updates: Iterable[ClientUpdate]) -> Sums:
        """Sum the updates as they arrive, so that only one of them is in memory."""
        total = WeightedSum()
        for update in updates:
            total.add(update.model(), self.client_weight(update))
        return {"model": total}

    def aggregate(self, sums: Sums) -> None:
        """Write the mean into the global model. Without an update, the model stays as it is."""
        mean = sums["model"].mean()
        if mean is not None:
            self.server.update(mean)

    def round(self, federation: Federation) -> None:
        """One round: clients train from the global model, the server averages and trains."""
        self.aggregate(self.accumulate(federation.train_clients()))
        federation.train_server()

    # What is evaluated and logged.

    def evaluated_model(self) -> State:
        """The weights and buffers that are evaluated and saved as the result: by default the global
        model.
        """
        return self.server.model()

    def configured_network(self) -> nn.Module:
        """The network as ``network`` configures it, with the working module's weights, under its
        own names.

        A method that splits or replaces the network overrides this, so that the exported weights
        fit the user's class.
        """
        return self.network

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        *,
        trust: Sequence[str] = (),
        map_location: str | torch.device = "cpu",
        strict: bool = True,
        **kwargs: Any,
    ) -> Self:
        """The trained method of a checkpoint.

        The file may be somebody else's: no pickled code in it runs, and only classes of this
        package, torch, torchvision, timm and peft are built. Lightning's own loader, which lets a
        file choose who builds its objects, has no part in it.

        Args:
            checkpoint_path: The file.
            trust: Names of modules, such as ``["my_networks"]``; the file may name any class or
                function that they define.
            map_location: The device of the method.
            strict: Whether the file must have all tensors of the method, and no others.
            **kwargs: Arguments of the method, in place of those in the file.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file is damaged, its arguments are not those of the method, or a
                class that it names is not trusted.
        """
        checkpoint = checkpoint_file.load(Path(checkpoint_path))
        saved = exclude(checkpoint["model"]["arguments"], kwargs)
        model: Self = made(cls, arguments_of(cls, saved, trust) | kwargs)
        model.configure_model()
        model.on_load_checkpoint(checkpoint)
        try:
            model.load_state_dict(checkpoint["state_dict"], strict=strict)
        except RuntimeError as error:
            raise ValueError(
                f"the weights in {checkpoint_path} are not those of {cls.__name__}: "
                f"{' '.join(str(error).split())}"
            ) from error
        return model.to(map_location)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Complete the evaluated model, which Lightning's ``load_from_checkpoint`` loads.

        The evaluated model may lack tensors that only training needs, such as a teacher. They are
        taken from the global model.
        """
        saved = checkpoint["federation"]
        names = self.state_dict()
        local = {name: t for name, t in names.items() if is_local(name, self.local_modules)}
        tensors = {**local, **saved["parameters"], **saved["buffers"], **checkpoint["state_dict"]}
        checkpoint["state_dict"] = select(tensors, names)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        """Log the loss of a validation batch.

        Returns the logits; the trainer computes its metrics from them.
        """
        return self._evaluation_step(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        """Log the loss of a test batch.

        Returns the logits; the trainer computes its metrics from them.
        """
        return self._evaluation_step(batch, "test")

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Class probabilities ``(batch, classes)``, or what else the task predicts."""
        return self.task.probabilities(self(batch[0]).float())

    def _evaluation_step(self, batch: tuple[Tensor, Tensor], stage: str) -> Tensor:
        x, y = batch
        logits: Tensor = self(x)
        weight = self.task.labeled_weight(logits, y)  # so that the batches' size does not matter
        self.log(f"{stage}/loss", self.task.labeled_loss(logits, y), batch_size=weight)
        return logits

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Add a value to a scalar's weighted mean over the round and all ranks.

        The weight is ``batch_size``, or 1 if it is left out. A value of weight 0, such as a mean
        over no image, does not count.
        """
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"{type(self).__name__}.log: the value of {name} is a tensor of shape "
                f"{tuple(value.shape)}: log one number, such as its mean"
            )
        if isinstance(value, Tensor):
            value = value.detach().clone()  # the method may go on to change it in place
        weight = kwargs.get("batch_size")
        client = self.clients.staging
        self.logged.append(Logged(name, value, 1 if weight is None else weight, client))

    def uploaded_weights(self) -> list[str]:
        """Names of the weights that clients upload: those that they train and do not keep."""
        return [name for name in trained_weights(self) if name in self.server.parameters]

    def uploaded_buffers(self) -> list[str]:
        """Names of the floating buffers that clients upload for the average: none of static or
        frozen batch norms.
        """
        modules = dict(self.named_modules())
        names = []
        for name, t in self.server.buffers.items():
            layer = modules[name.rpartition(".")[0]]
            if t.is_floating_point() and not isinstance(layer, StaticBatchNorm2d):
                names.append(name)
        return names


class JointStep(NamedTuple):
    """What the server of split learning computes at a step.

    Attributes:
        loss: The loss, a mean over the images of all clients.
        pseudo: The pseudo-labels of the images, if any.
        image_losses: The loss of each image, ``(clients * batch,)``, whose mean is ``loss``. The
            mean over a client's images is logged as its loss. If left out, ``loss`` is logged for
            every client.
    """

    loss: Tensor
    pseudo: PseudoLabels | None = None
    image_losses: Tensor | None = None


class JointAlgorithm(FederatedAlgorithm, ABC):
    """The base of split learning: clients and server train one network together, step by step.

    In :meth:`Federation.train_jointly` every client of the cohort has its own copy of the part of
    the network that
    :meth:`at_clients` names. At every step each client uploads what :meth:`client_features`
    computes from its batch. The server makes one step on the loss of :meth:`joint_training_step`.
    Every client downloads the gradient of its features and makes one step. All batches have one
    size, and all clients make equally many steps.
    """

    not_deployable = "exchanges features and gradients with every client at every step"
    no_personal = "trains one network with its clients, step by step"

    @abstractmethod
    def at_clients(self, name: str) -> bool:
        """Whether each client has its own copy of a weight or buffer of the working module."""

    @abstractmethod
    def client_features(self, batch: Batch, batch_idx: int) -> State:
        """What a client uploads at a step, ``(batch, ...)`` each.

        Only ``student`` receives a gradient.
        """

    @abstractmethod
    def joint_training_step(self, features: State, batch_idx: int) -> JointStep:
        """The loss of the server at a step.

        Args:
            features: What the clients uploaded, ``(clients, batch, ...)`` each, in the cohort's
                order.
            batch_idx: The step.
        """

    def step_sizes(self, client: int, features: State) -> tuple[Sizes, Sizes]:
        """Bytes by name that a client uploads and downloads at one step: by default its features,
        and their gradient.

        Args:
            client: The client.
            features: What it uploaded, ``(batch, ...)`` each.
        """
        up = {f"{name} features": size for name, size in sizes_of(features).items()}
        return up, {"feature gradients": up["student features"]}
