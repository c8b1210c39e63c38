"""One file per paper."""

from lightning_fedssl.algorithms.cbafed import CBAFed
from lightning_fedssl.algorithms.easgd import EASGD, OverlapSGD
from lightning_fedssl.algorithms.fed_shvr import FedSHVR
from lightning_fedssl.algorithms.fedavg import FedAvg
from lightning_fedssl.algorithms.feddb import FedDB
from lightning_fedssl.algorithms.fedmatch import FedMatch
from lightning_fedssl.algorithms.fedrgd import FedRGD
from lightning_fedssl.algorithms.fedswitch import FedSwitch
from lightning_fedssl.algorithms.fedswitch_sl import FedSwitchSL
from lightning_fedssl.algorithms.fixmatch import FixMatch
from lightning_fedssl.algorithms.fl2 import FL2
from lightning_fedssl.algorithms.mean_teacher import MeanTeacher
from lightning_fedssl.algorithms.proxyfl import ProxyFL
from lightning_fedssl.algorithms.pseudo_label import PseudoLabel
from lightning_fedssl.algorithms.rscfed import RSCFed
from lightning_fedssl.algorithms.sage import SAGE
from lightning_fedssl.algorithms.scaffold import SCAFFOLD
from lightning_fedssl.algorithms.self_training import SelfTraining
from lightning_fedssl.algorithms.semi_sfl import SemiSFL
from lightning_fedssl.algorithms.semifl import SemiFL
from lightning_fedssl.algorithms.supervised import Supervised
from lightning_fedssl.algorithms.uda import UDA

__all__ = [
    "EASGD",
    "FL2",
    "SAGE",
    "SCAFFOLD",
    "UDA",
    "CBAFed",
    "FedAvg",
    "FedDB",
    "FedMatch",
    "FedRGD",
    "FedSHVR",
    "FedSwitch",
    "FedSwitchSL",
    "FixMatch",
    "MeanTeacher",
    "OverlapSGD",
    "ProxyFL",
    "PseudoLabel",
    "RSCFed",
    "SelfTraining",
    "SemiFL",
    "SemiSFL",
    "Supervised",
]
