"""Server and clients on separate machines, with Flower (https://flower.ai): ``pip install
.[flower]``.

``messages`` are the records that server and nodes exchange, and the border at which the server
compares what a node sends with what it expects. ``server`` is the side of the server, ``node`` that
of the clients.
"""

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]
"""Values by name: those of a message, or of one of Flower's configurations."""
