"""Which client updates the server accepts."""

from __future__ import annotations

from lightning_fedssl.functional.averaging import is_finite
from lightning_fedssl.state import ClientUpdate


def reason_to_reject(update: ClientUpdate) -> str | None:
    """Why the server rejects a client's update; None accepts it.

    A rejected update does not enter the average, and the client's persistent state stays what it was before the round.

    Args:
        update: The update as it was sent, payload included.

    Returns:
        What the client did, to follow its number in a sentence: "client 3 returned weights that are not finite".
    """
    tensors = [*update.parameters.values(), *update.buffers.values(), *update.payload.values()]
    return None if is_finite(tensors) else "returned weights that are not finite"
