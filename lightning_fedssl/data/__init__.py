"""Data sets, partitions, and batched views of images.

``FederatedDataModule`` is imported when it is first used, because it imports Lightning, which takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_fedssl.data.augment.custom import (
    BatchView,
    Compose,
    FeatureMask,
    GaussianNoise,
    PerSample,
    Scaling,
    TimeMask,
)
from lightning_fedssl.data.local_data import LocalData, Views, Visits
from lightning_fedssl.data.partition.base import ClientDirichlet, Dirichlet, FromFile, Iid, Partition, Shards
from lightning_fedssl.data.partition.class_skew import ClassSkew
from lightning_fedssl.data.partition.client_types import ClientTypes
from lightning_fedssl.data.partition.federated_split import FederatedSplit, SplitRequest
from lightning_fedssl.data.partition.labels_at_clients import ClassMismatch, LabeledClasses, Stratified
from lightning_fedssl.data.partition.natural import FullyLabeledClients, NaturalClients
from lightning_fedssl.data.partition.pooled import Pooled
from lightning_fedssl.data.sources import (
    Arrays,
    BreastCancer,
    Columns,
    Datasets,
    DataSource,
    FromLightning,
    HuggingFace,
    ImageList,
    ImageTable,
    LoadedData,
    Signals,
    SiteFolders,
)

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule as FederatedDataModule

__all__ = [
    "Arrays",
    "BatchView",
    "BreastCancer",
    "ClassMismatch",
    "ClassSkew",
    "ClientDirichlet",
    "ClientTypes",
    "Columns",
    "Compose",
    "DataSource",
    "Datasets",
    "Dirichlet",
    "FeatureMask",
    "FederatedDataModule",
    "FederatedSplit",
    "FromFile",
    "FromLightning",
    "FullyLabeledClients",
    "GaussianNoise",
    "HuggingFace",
    "Iid",
    "ImageList",
    "ImageTable",
    "LabeledClasses",
    "LoadedData",
    "LocalData",
    "NaturalClients",
    "Partition",
    "PerSample",
    "Pooled",
    "Scaling",
    "Shards",
    "Signals",
    "SiteFolders",
    "SplitRequest",
    "Stratified",
    "TimeMask",
    "Views",
    "Visits",
]


def __getattr__(name: str) -> Any:
    if name == "FederatedDataModule":
        from lightning_fedssl.data.datamodule import FederatedDataModule

        return FederatedDataModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
