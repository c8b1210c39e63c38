"""Whether an update can be one of its client: the only check, of a simulation and of a deployment."""

from __future__ import annotations

import math

from torch import Tensor

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.functional.averaging import is_finite
from lightning_fedssl.state import ClientUpdate

MOST = 2**53
"""The largest number of images or steps that is counted exactly."""


def check_update(
    algorithm: FederatedAlgorithm, update: ClientUpdate, most_samples: int = MOST, most_steps: int = MOST
) -> str | None:
    """Why the server rejects an update, independently of other updates; None if there is no reason.

    A rejected update does not enter the average, and the client's persistent state stays what it was before the round.

    Args:
        algorithm: Its global model has the shapes and types that an update must have.
        update: The update as it was sent.
        most_samples: Images that this client can have trained on.
        most_steps: Steps that it can have made.

    Returns:
        The end of a sentence about the client: "client 3 *returned weights that are not finite*".
    """
    if not (0 <= update.num_samples <= most_samples and 1 <= update.num_steps <= most_steps):
        return (
            f"counts {update.num_samples} samples and {update.num_steps} steps, but at most {most_samples} samples and "
            f"{most_steps} steps are possible"
        )
    model = algorithm.server.model()
    for name, t in {**update.parameters, **update.buffers}.items():
        if name not in model:
            return f"returned {name!r}, which the global model does not have"
        if (t.shape, t.dtype) != (model[name].shape, model[name].dtype):
            return f"returned {name!r} as {described(t)} instead of {described(model[name])}"
    if not is_finite([*update.parameters.values(), *update.buffers.values(), *update.payload.values()]):
        return "returned weights that are not finite"
    for name, t in update.buffers.items():
        if name.endswith("running_var") and float(t.min()) < 0:
            return f"returned a negative variance {name!r}"
    weight = algorithm.client_weight(update)
    return None if math.isfinite(weight) and weight >= 0 else f"has the weight {weight} in the average"


def described(t: Tensor) -> str:
    """The type and shape of a tensor."""
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
