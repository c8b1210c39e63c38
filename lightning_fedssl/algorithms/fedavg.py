"""FedAvg and FedProx: federated averaging with labels at the clients.

B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, arXiv 1602.05629. T. Li, A. K. Sahu, M.
Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020, arXiv 1812.06127.

A round:

1. the server sends the global weights w to the drawn clients;
2. each takes local steps on its labelled images, FedProx with ``mu/2 ||w_k - w||^2`` added to the
   loss;
3. the server averages the trained weights, weighted by the number of images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fedssl.algorithm import Place
from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.common.server_phases import ServerPhases
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.functional.dictionaries import select, starting_with
from lightning_fedssl.functional.losses import proximal_term
from lightning_fedssl.interop import FitsLightningModule, SendsCounters, federation
from lightning_fedssl.state import Batch
from lightning_fedssl.storage.hyperparameters import hyperparameters
from lightning_fedssl.task import Need


@hyperparameters
class FedAvg(ServerPhases):
    """Federated averaging on labelled clients; FedProx with ``prox_mu`` above 0.

    Args:
        prox_mu: mu, the weight of the proximal term (FedProx Eq. 2); 0 is FedAvg.

    Example:
        >>> from functools import partial
        >>> import torch
        >>> from lightning_fedssl import MLP
        >>> rate = partial(torch.optim.SGD, lr=0.1)
        >>> FedAvg(network=partial(MLP, hidden=[8]), optimizer=rate, client_epochs=2).client_epochs
        2
    """

    same_step_every_round = True
    needs: ClassVar[Need] = "loss"
    labels_at: ClassVar[Place | None] = "clients"

    prox_mu: float = 0.0

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.require(
            self.prox_mu >= 0, "prox_mu", self.prox_mu, "give 0 (FedAvg) or more (FedProx)"
        )

    @classmethod
    def from_lightning(
        cls,
        module: LightningModule,
        clients: Sequence[Any],
        *,
        server: DataLoader[Any] | None = None,
        val_dataloaders: Any = None,
        test_dataloaders: Any = None,
        **kwargs: Any,
    ) -> tuple[FedAvg, FederatedDataModule]:
        """A federation that trains any LightningModule:
        ``trainer.fit(*FedAvg.from_lightning(module, clients))``.

        In a round, Lightning's ``Trainer`` fits the module to the loader of each drawn client,
        beginning with the global weights and a new call of ``configure_optimizers``; all of the
        module's hooks are called. What it logs is averaged over the clients under its own names.
        See :mod:`lightning_fedssl.interop`.

        Args:
            module: Needs ``training_step`` and ``configure_optimizers``, and for unlabelled batches
                ``unlabeled_training_step(batch, batch_idx)``, which returns their loss. After the
                run it has the global weights.
            clients: A loader for each client, of labelled batches without ``server`` and of
                unlabelled ones with it; or ``{"labeled": loader, "unlabeled": loader}`` for each.
                A sequence that is not a list or tuple makes a client's loader when the client is
                drawn.
            server: The server's loader of labelled batches; it trains by ``training_step``.
            val_dataloaders: One or several loaders for the module's ``validation_step``, after
                every round.
            test_dataloaders: Likewise for ``test_step``, at the end.
            kwargs: ``client_epochs`` and ``server_epochs`` (whole numbers), ``prox_mu``,
                ``client_weighting``, ``gradient_clip_norm``, ``schedule`` (factors of the module's
                learning rates over the rounds), and those of the server's phases.

        Raises:
            ValueError: Names the argument, or the client, and what to give instead.
        """
        if cls is not FedAvg:
            raise ValueError(
                f"{cls.__name__}.from_lightning: take FedAvg.from_lightning, and give the module "
                "an unlabeled_training_step, such as FixMatch's loss: "
                "consistency_loss(self(strong), pseudo_label(self(weak).detach(), 0.95))"
            )
        evaluated = {"validate": val_dataloaders, "test": test_dataloaders}
        return federation(
            LightningFedAvg, CountingFedAvg, module, clients, server, evaluated, kwargs
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """The task's loss, with FedProx's proximal term."""
        loss = super().training_step(batch, batch_idx)
        return loss if loss is None else self.with_proximal_term(loss)

    def with_proximal_term(self, loss: Tensor) -> Tensor:
        """Add ``mu/2 ||w_k - w||^2`` to the loss, with w the global weights.

        Args:
            loss: A scalar.
        """
        if self.prox_mu == 0:
            return loss
        global_weights = self.server.parameters
        weights = select(dict(self.named_parameters()), starting_with("network.", global_weights))
        before = [global_weights[name] for name in weights]
        return loss + self.prox_mu * proximal_term(weights.values(), before)


class LightningFedAvg(FitsLightningModule, FedAvg):
    """FedAvg and FedProx of a LightningModule; made by :meth:`FedAvg.from_lightning`.

    Args:
        network: Returns the module.
        kwargs: The arguments of the method.
    """

    def __init__(self, network: Callable[[], LightningModule], **kwargs: Any) -> None:
        super().__init__(network=network, **kwargs)
        checks.require(
            self.prox_mu == 0 or self.network.automatic_optimization, "prox_mu", self.prox_mu,
            "it is added to a loss, which a module with manual optimization has not",
        )  # fmt: skip

    def client_loss(self, loss: Tensor) -> Tensor:
        """The module's loss with FedProx's proximal term."""
        return self.with_proximal_term(loss)


class CountingFedAvg(SendsCounters, LightningFedAvg):
    """FedAvg of a LightningModule that has buffers of whole numbers, such as counters of steps.

    Args:
        network: Returns the module.
        kwargs: The arguments of the method.
    """
