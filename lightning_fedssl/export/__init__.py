"""The trained model as a file that other programs can use: description, weights, and the formats of
``export``.
"""

from .checkpoint import network_of
from .description import describe_model
from .formats import FORMATS, export
from .model_file import LoadedNetwork, load_network, save_model

__all__ = [
    "FORMATS",
    "LoadedNetwork",
    "describe_model",
    "export",
    "load_network",
    "network_of",
    "save_model",
]
