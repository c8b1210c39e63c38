"""Data of your own: where the samples, the labels and the clients' identifiers come from.

A sample is an 8-bit image ``(channels, height, width)`` or numbers of any shape: a table's row ``(features,)``, a
signal ``(channels, time)``, an image ``(channels, height, width)`` of floating numbers. Numbers are held as float32.
"""

from lightning_fedssl.data.sources.base import DataSource, LoadedData
from lightning_fedssl.data.sources.examples import BreastCancer, Signals
from lightning_fedssl.data.sources.hugging_face import Columns, HuggingFace
from lightning_fedssl.data.sources.image_tables import ImageList, ImageTable, ListedImage, SiteFolders
from lightning_fedssl.data.sources.lightning_data import FromLightning, LightningData
from lightning_fedssl.data.sources.torch_datasets import Arrays, Datasets, as_dataset

__all__ = [
    "Arrays",
    "BreastCancer",
    "Columns",
    "DataSource",
    "Datasets",
    "FromLightning",
    "HuggingFace",
    "ImageList",
    "ImageTable",
    "LightningData",
    "ListedImage",
    "LoadedData",
    "Signals",
    "SiteFolders",
    "as_dataset",
]
