"""The hooks of a federated run: what a callback may override, as typed no-ops.

The loop calls no hook that is not named here or in ``lightning.pytorch.Callback``, so a misspelt
name is an error at once instead of a hook that never runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar

from lightning.pytorch.callbacks import Callback

from lightning_fedssl.metrics.rounds import Metrics

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_fedssl.algorithm import FederatedAlgorithm
    from lightning_fedssl.data.local_data import LocalData
    from lightning_fedssl.functional.pseudo_labels import PseudoLabels
    from lightning_fedssl.local_work import LocalWork
    from lightning_fedssl.run import TrainerView
    from lightning_fedssl.state import ClientUpdate, Direction


def at_least(minimum: int, **arguments: int) -> None:
    """Refuse arguments of a callback that are smaller."""
    for name, value in arguments.items():
        if value < minimum:
            raise ValueError(f"{name} is {value}: give {minimum} or more")


class FederatedCallback(Callback):
    """A Lightning callback with hooks for the phases of a federated round, in the order in which
    they are called.

    Lightning's own ``setup``, ``on_fit_start``, ``on_train_start``, ``on_train_epoch_start``,
    ``on_train_epoch_end``, ``on_validation_end``, ``on_train_end``, ``on_fit_end``,
    ``on_exception``, ``teardown``, ``state_dict`` and ``load_state_dict`` are called too, with a
    round as the epoch.

    A callback that remembers something from one round to the next sets its first values in
    :meth:`reset`, calls it at the end of ``__init__``, and names them in ``saved``. Then a second
    ``fit`` begins like the first, and a run that resumes continues like one that was not
    interrupted::

        saved = ("losses",)

        def __init__(self, window: int) -> None:
            self.window = window
            self.reset()

        def reset(self) -> None:
            self.losses: list[float] = []

    With several ranks, the hooks of single clients (``on_client_start``, ``on_client_batch_end``,
    ``on_client_end``, ``on_client_judged``, ``on_pseudo_labels``, ``on_transfer``) are called on
    the rank that trains the client, and a checkpoint has the state of rank 0. A callback that
    counts clients adds up all ranks' values by ``trainer.gather`` in a hook that every rank calls,
    such as :meth:`on_round_end`.

    Example:
        >>> class Loss(FederatedCallback):
        ...     def on_round_end(self, trainer, algorithm, metrics):
        ...         print(trainer.round_index, metrics["client/loss"])
    """

    saved: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: the attributes ``saved``."""
        return {name: copy(getattr(self, name)) for name in self.saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from :meth:`state_dict`."""
        for name in self.saved:
            setattr(self, name, copy(state_dict[name]))

    def reset(self) -> None:
        """Forget an earlier run. Called when ``fit`` starts, before a checkpoint is loaded."""

    def on_round_start(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Called at the start of a round, after ``trainer.cohort`` was drawn.

        Adapt hyper-parameters here.
        """

    def on_server_phase_start(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Called before the server trains; the working module holds the global model."""

    def on_server_batch_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, step: int
    ) -> None:
        """Called after each optimizer step of the server."""

    def on_server_phase_end(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Called after the server has trained; ``algorithm.server`` holds the new global model."""

    def on_client_phase_start(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Called before the first broadcast.

        Compute here what clients receive with the weights (sBN statistics).
        """

    def on_transfer(
        self,
        trainer: TrainerView,
        algorithm: FederatedAlgorithm,
        client: int,
        direction: Direction,
        sizes: Mapping[str, int],
    ) -> None:
        """Called whenever a client receives (``down``) or sends (``up``) tensors.

        Args:
            trainer: The run.
            algorithm: The method of the run.
            client: The client.
            direction: ``down`` or ``up``.
            sizes: Bytes of each tensor by its name.
        """

    def on_client_start(
        self,
        trainer: TrainerView,
        algorithm: FederatedAlgorithm,
        data: LocalData,
        work: LocalWork,
    ) -> None:
        """Called when a client has prepared its local work, before its first step; also if it skips
        the round.
        """

    def on_pseudo_labels(
        self,
        trainer: TrainerView,
        algorithm: FederatedAlgorithm,
        indices: Tensor,
        pseudo: PseudoLabels,
    ) -> None:
        """Called at every joint step of a split method (Semi-SFL, FedSwitch-SL), once for each
        client.

        Methods that label once a round give :meth:`on_client_start` the labels of the client's
        unlabelled images as ``work.pseudo_labels``. Methods that label inside of ``training_step``
        give none.

        Args:
            trainer: The run.
            algorithm: The method of the run.
            indices: The numbers of the images in the training data, ``(images,)``.
            pseudo: Their pseudo-labels.
        """

    def on_client_batch_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, step: int
    ) -> None:
        """Called after each optimizer step of a client."""

    def on_client_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, update: ClientUpdate
    ) -> None:
        """Called when a client has finished; copy the tensors of the update to use them later.

        The server has not judged the update yet: see :meth:`on_client_judged`.
        """

    def on_client_judged(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, client: int, accepted: bool
    ) -> None:
        """Called when the server has accepted a client's update, or has left it out because it is
        rejected.

        Args:
            trainer: The run.
            algorithm: The method of the run.
            client: The client.
            accepted: Whether the update enters the new model.
        """

    def on_aggregate(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Called when the updates are summed over clients and ranks, before the server aggregates
        them.
        """

    def on_global_model(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Called when the global model of the round is final.

        Compute here what is evaluated and saved with it.
        """

    def on_evaluation_start(self, trainer: TrainerView, algorithm: FederatedAlgorithm) -> None:
        """Called before the global model is evaluated."""

    def on_evaluation_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, metrics: Metrics
    ) -> None:
        """Called with the metrics of an evaluation, e.g. ``val/accuracy``.

        Metrics that a callback adds are logged.
        """

    def on_round_end(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, metrics: Metrics
    ) -> None:
        """Called at the end of a round with all its scalars, after they were logged: to read them.

        What is to be logged with the round is logged by ``trainer.log`` in :meth:`on_global_model`
        or earlier.
        """

    def on_pictures(
        self, trainer: TrainerView, algorithm: FederatedAlgorithm, is_last: bool
    ) -> None:
        """Called after every round, once it is known whether the run ends with it.

        Draw pictures of the round here.

        Args:
            trainer: The run.
            algorithm: The method of the run.
            is_last: Whether the run ends with this round: by ``max_rounds``, or because a callback
                asked to stop. A run that a signal interrupts does not end: it can be resumed.
        """
