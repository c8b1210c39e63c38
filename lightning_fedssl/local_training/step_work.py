"""How much a client's step computes, for the simulated time of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric import Fabric
from torch import Tensor
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from lightning_fedssl.algorithm import FederatedAlgorithm, JointAlgorithm
from lightning_fedssl.data.local_data import LocalData, own_random_stream
from lightning_fedssl.functional.calls import CallOf
from lightning_fedssl.functional.dictionaries import add_prefix, map_values, tensors_of
from lightning_fedssl.functional.losses import added
from lightning_fedssl.functional.stacking import shapes_of
from lightning_fedssl.local_training.sequential import recording
from lightning_fedssl.local_work import LocalWork


def step_work(
    algorithm: FederatedAlgorithm,
    data: LocalData,
    work: LocalWork,
    fabric: Fabric,
    cache: dict[Any, float],
) -> float:
    """The operations of a client's first step, divided by those of a plain step.

    A plain step passes ``data.batch_size`` images through the network, forward and backward. Both
    steps are made once on copies of the weights, and PyTorch counts the operations of convolutions,
    matrix products and attention. In split training it is the client's part of the step.

    Args:
        algorithm: The working module, with the client's initial weights; it stays as it is, in
            training mode.
        data: The client's data.
        work: Its steps. Those of a work that trains by itself (``work.train``) count as plain ones.
        fabric: For the precision.
        cache: Results of this round by the shapes of the batch; a new one is added.
    """
    if work.train is not None:
        return 1.0
    batch = map_values(Tensor.clone, work.batch(0))  # a loss may change a batch in place
    shapes = shapes_of(batch)
    if shapes not in cache:
        algorithm.train()
        function = "client_features" if isinstance(algorithm, JointAlgorithm) else "training_step"
        images = data.plain(data.images.new_zeros(data.batch_size).long())
        with own_random_stream(data, "step work"):
            plain = _operations(algorithm, fabric, "forward", images)
            cache[shapes] = (
                _operations(algorithm, fabric, function, batch, 0) / plain if plain else 1.0
            )
    return cache[shapes]


def _operations(
    algorithm: FederatedAlgorithm, fabric: Fabric, function: str, *arguments: Any
) -> int:
    """The floating-point operations of a function and of the backward pass from what it returns."""
    tensors = tensors_of(algorithm)
    copies = {
        name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in tensors.items()
    }
    state = add_prefix("algorithm.", copies)
    with FlopCounterMode(display=False) as counted:
        with fabric.autocast(), recording(algorithm, []):
            returned = functional_call(
                CallOf(algorithm, function), state, arguments, tie_weights=False
            )
        outputs = returned.values() if isinstance(returned, Mapping) else [returned]
        sums = [t.sum() for t in outputs if isinstance(t, Tensor) and t.requires_grad]
        if sums:
            fabric.backward(added(sums))
    operations: int = counted.get_total_flops()
    return operations
