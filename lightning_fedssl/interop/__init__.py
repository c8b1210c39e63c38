"""A LightningModule with data loaders as the model and the data of a federation."""

from lightning_fedssl.interop.fits import FitsLightningModule, SendsCounters, federation
from lightning_fedssl.interop.loaders import LoaderData

__all__ = ["FitsLightningModule", "LoaderData", "SendsCounters", "federation"]
