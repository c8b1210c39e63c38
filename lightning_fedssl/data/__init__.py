"""Data sets, partitions, and batched views of images."""

from lightning_fedssl.data.augment.custom import (
    BatchView,
    Compose,
    FeatureMask,
    GaussianNoise,
    PerSample,
    Scaling,
    TimeMask,
)
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.data.local_data import LocalData, Views, Visits
from lightning_fedssl.data.partition.base import (
    ClientDirichlet,
    Dirichlet,
    FromFile,
    Iid,
    Partition,
    Shards,
)
from lightning_fedssl.data.partition.class_skew import ClassSkew
from lightning_fedssl.data.partition.client_types import ClientTypes
from lightning_fedssl.data.partition.federated_split import FederatedSplit, SplitRequest
from lightning_fedssl.data.partition.flower import FlowerPartitions
from lightning_fedssl.data.partition.labels_at_clients import (
    ClassMismatch,
    LabeledClasses,
    Stratified,
)
from lightning_fedssl.data.partition.natural import FullyLabeledClients, NaturalClients
from lightning_fedssl.data.partition.paired import PairedDirichlet
from lightning_fedssl.data.partition.pooled import Pooled
from lightning_fedssl.data.sources.arrays import Arrays, Datasets
from lightning_fedssl.data.sources.base import DataSource, LoadedData
from lightning_fedssl.data.sources.examples import BreastCancer, Signals
from lightning_fedssl.data.sources.hugging_face import Columns
from lightning_fedssl.data.sources.image_lists import (
    ImageFolder,
    ImageList,
    ImageTable,
    MaskFolders,
    SiteFolders,
)
from lightning_fedssl.data.sources.lightning_data import FromLightning
from lightning_fedssl.data.sources.table import Table

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
    "FlowerPartitions",
    "FromFile",
    "FromLightning",
    "FullyLabeledClients",
    "GaussianNoise",
    "Iid",
    "ImageFolder",
    "ImageList",
    "ImageTable",
    "LabeledClasses",
    "LoadedData",
    "LocalData",
    "MaskFolders",
    "NaturalClients",
    "PairedDirichlet",
    "Partition",
    "PerSample",
    "Pooled",
    "Scaling",
    "Shards",
    "Signals",
    "SiteFolders",
    "SplitRequest",
    "Stratified",
    "Table",
    "TimeMask",
    "Views",
    "Visits",
]
