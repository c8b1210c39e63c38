"""Networks: small ones for laptops, and those of the papers. :func:`build_network` builds the
configured one.
"""

from __future__ import annotations

from lightning_fedssl.models.alexnet import AlexNet
from lightning_fedssl.models.backbones import Backbone, RandomKernels, TimmBackbone
from lightning_fedssl.models.cnn import CNN
from lightning_fedssl.models.cnn13 import CNN13
from lightning_fedssl.models.emnist_cnn import EMNISTCNN
from lightning_fedssl.models.layers import NormKind, StaticBatchNorm2d, make_norm
from lightning_fedssl.models.lora import TimmLoRA
from lightning_fedssl.models.mlp import MLP
from lightning_fedssl.models.network import Network, NetworkFactory, build_network
from lightning_fedssl.models.resnet import ResNet8, ResNet9, ResNet18
from lightning_fedssl.models.signal_cnn import SignalCNN
from lightning_fedssl.models.svhn_cnn import SVHNCNN
from lightning_fedssl.models.unet import UNet
from lightning_fedssl.models.vgg import VGG11, VGG16
from lightning_fedssl.models.wide_resnet import WideResNet

__all__ = [
    "CNN",
    "CNN13",
    "EMNISTCNN",
    "MLP",
    "SVHNCNN",
    "VGG11",
    "VGG16",
    "AlexNet",
    "Backbone",
    "Network",
    "NetworkFactory",
    "NormKind",
    "RandomKernels",
    "ResNet8",
    "ResNet9",
    "ResNet18",
    "SignalCNN",
    "StaticBatchNorm2d",
    "TimmBackbone",
    "TimmLoRA",
    "UNet",
    "WideResNet",
    "build_network",
    "make_norm",
]
