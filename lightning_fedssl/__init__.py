"""Federated semi-supervised learning with Lightning.

The classes of the package can be imported from here; a module is imported when one of its names is first used::

    from lightning_fedssl import MLP, FederatedDataModule, FederatedTrainer, SemiFL
"""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fedssl.algorithm import FederatedAlgorithm as FederatedAlgorithm
    from lightning_fedssl.algorithms import *
    from lightning_fedssl.callback import FederatedCallback as FederatedCallback
    from lightning_fedssl.callbacks import *
    from lightning_fedssl.cli.experiment import Experiment as Experiment
    from lightning_fedssl.data import *
    from lightning_fedssl.models import *
    from lightning_fedssl.schedules import Constant as Constant
    from lightning_fedssl.schedules import Cosine as Cosine
    from lightning_fedssl.schedules import FractionalCosine as FractionalCosine
    from lightning_fedssl.schedules import Schedule as Schedule
    from lightning_fedssl.system import Availability as Availability
    from lightning_fedssl.system import Device as Device
    from lightning_fedssl.system import DiurnalDropout as DiurnalDropout
    from lightning_fedssl.system import RandomDropout as RandomDropout
    from lightning_fedssl.system import SystemModel as SystemModel
    from lightning_fedssl.system import UnevenDropout as UnevenDropout
    from lightning_fedssl.trainer import FederatedTrainer as FederatedTrainer

__version__ = "0.1.0"

_MODULE_OF = {
    "Availability": "system",
    "Constant": "schedules",
    "Device": "system",
    "DiurnalDropout": "system",
    "Cosine": "schedules",
    "Experiment": "cli.experiment",
    "FederatedAlgorithm": "algorithm",
    "FederatedCallback": "callback",
    "FederatedTrainer": "trainer",
    "FractionalCosine": "schedules",
    "RandomDropout": "system",
    "Schedule": "schedules",
    "SystemModel": "system",
    "UnevenDropout": "system",
}
_COLLECTIONS = ("models", "data", "callbacks", "algorithms")
"""Packages whose public names can all be imported from here."""

# In a source checkout callbacks/ and configs/ are next to the package; installed, they are inside it.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "callbacks" / "__init__.py").is_file() and (_checkout / "pyproject.toml").is_file():
    __path__.append(str(_checkout))


def __getattr__(name: str) -> Any:
    """Import a class when it is first used.

    Only capitalised names are searched. Another name, as in ``from lightning_fedssl import sampling``, is a module.
    """
    if name == "__all__":
        return sorted({*_MODULE_OF, *(n for package in _COLLECTIONS for n in _names(package))})
    if name[0].isupper():
        packages = [_MODULE_OF[name]] if name in _MODULE_OF else [p for p in _COLLECTIONS if name in _names(p)]
        if packages:
            return getattr(import_module(f"{__name__}.{packages[0]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


@cache
def _names(package: str) -> list[str]:
    """The classes of a package; its ``__all__`` is read as text, because most packages import Lightning."""
    spec = find_spec(f"{__name__}.{package}")
    assert spec is not None
    assert spec.origin is not None
    (listed,) = re.findall(r"^__all__ = \[(.*?)\]", Path(spec.origin).read_text(encoding="utf-8"), re.M | re.S)
    return re.findall(r'"([A-Z]\w*)"', listed)
