"""The data of a federation as a Lightning data module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from torch.utils.data import Dataset

from lightning_fedssl.data.federated_data import FederatedData
from lightning_fedssl.data.partition.natural import NaturalClients
from lightning_fedssl.data.sources import Datasets, as_dataset

Samples = Dataset[Any] | Sequence[Any]
"""A data set of pairs, or a tuple of tensors or arrays: ``(samples, labels)``, or ``(samples,)`` without labels."""


class FederatedDataModule(FederatedData, LightningDataModule):  # noqa: D101 -- documented where its keys are
    __doc__ = FederatedData.__doc__

    @classmethod
    def from_datasets(  # type: ignore[override]
        cls,
        train: Samples,
        test: Samples,
        unlabeled: Samples | None = None,
        validation: Samples | float | Literal["test"] | None = None,
        *,
        weak: str | Callable[..., Any],
        strong: str | Callable[..., Any],
        client_ids: Sequence[Any] | None = None,
        test_client_ids: Sequence[Any] | None = None,
        unlabeled_client_ids: Sequence[Any] | None = None,
        class_names: Sequence[str] | None = None,
        **rest: Any,
    ) -> FederatedDataModule:
        """A federation of PyTorch data sets that give ``(sample, label)``, or of tensors.

        With ``client_ids``, the partition is :class:`~lightning_fedssl.data.partition.natural.NaturalClients` and
        ``num_clients`` the number of identifiers, unless they are given.

        Args:
            train: Training samples: a data set, or ``(samples, labels)``.
            test: Test samples, likewise.
            unlabeled: Samples without labels, which only clients get: a data set, or ``(samples,)``.
            validation: Validation samples as ``train``; or a fraction or ``test``, as the argument of the data module.
            weak: Weak view: a name, none, or a function; see :mod:`lightning_fedssl.data.augment.custom`.
            strong: Strong view, likewise.
            client_ids: For every training sample the identifier of its client.
            test_client_ids: For every test sample the identifier of its client.
            unlabeled_client_ids: For every sample without a label the identifier of its client.
            class_names: Names of the classes, in the order of the labels.
            rest: Further arguments of the data module.
        """
        if isinstance(validation, (int, float, str)):
            rest, validation = {"validation": validation, **rest}, None
        source = Datasets(
            as_dataset(train), as_dataset(test),
            None if unlabeled is None else as_dataset(unlabeled),
            None if validation is None else as_dataset(validation),
            client_ids, test_client_ids, unlabeled_client_ids, class_names,
        )  # fmt: skip
        if source.client_ids is not None:
            clients = source.load().train.client_ids
            assert clients is not None
            rest = {"partition": NaturalClients(), "num_clients": int(clients.max()) + 1, **rest}
        return cls(source, weak=weak, strong=strong, **rest)


def require_federated(datamodule: object) -> None:
    """Refuses what is no federated data module.

    Args:
        datamodule: What a trainer was given.

    Raises:
        TypeError: With the way to adapt a data module of Lightning's.
    """
    if not isinstance(datamodule, FederatedDataModule):
        raise TypeError(
            f"FederatedTrainer needs a FederatedDataModule, not {type(datamodule).__name__}. A Lightning data module "
            "is adapted by FederatedDataModule(datamodule, weak=..., strong=..., num_clients=...)"
        )
