"""Data sets, how they are assigned to a federation, and batched views of their images."""

from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData, Views
from lightning_fedssl.data.partition.base import ClientDirichlet, Dirichlet, FromFile, Iid, Partition, Shards
from lightning_fedssl.data.partition.class_skew import ClassSkew
from lightning_fedssl.data.partition.client_types import ClientTypes
from lightning_fedssl.data.partition.federated_split import FederatedSplit, SplitRequest
from lightning_fedssl.data.partition.labels_at_clients import ClassMismatch, LabeledClasses, Stratified
from lightning_fedssl.data.partition.pooled import Pooled

__all__ = [
    "ClassMismatch",
    "ClassSkew",
    "ClientDirichlet",
    "ClientTypes",
    "Dirichlet",
    "FederatedDataModule",
    "FederatedSplit",
    "FromFile",
    "Iid",
    "LabeledClasses",
    "LocalData",
    "Partition",
    "Pooled",
    "Shards",
    "SplitRequest",
    "Stratified",
    "Views",
]
