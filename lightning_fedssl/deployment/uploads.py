"""What a node uploads after a client's training: which tensors the server expects, and how it reads them."""

from __future__ import annotations

import torch

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.deployment.messages import MessageError, Report
from lightning_fedssl.deployment.tensors import PAYLOAD, check_tensors, parts_of
from lightning_fedssl.functional.averaging import State, is_finite
from lightning_fedssl.functional.batch_norm import Moments, local_moments
from lightning_fedssl.state import ClientUpdate, optimizer_state
from lightning_fedssl.trainer import FederatedTrainer
from lightning_fedssl.trainer.setup import build_optimizer


def read_update(algorithm: FederatedAlgorithm, report: Report, tensors: State) -> ClientUpdate:
    """The update that a message holds.

    Args:
        algorithm: Its global model has the names, shapes and types that are expected.
        report: The values of the message.
        tensors: The tensors of the message, without a state of the client.

    Raises:
        MessageError: If the tensors are not the trained weights, the uploaded buffers and the payload of the method, or
            a number is impossible.
    """
    if report.num_samples < 1 or report.num_steps < 1:
        raise MessageError(f"it counts {report.num_samples} samples and {report.num_steps} steps")
    server, payload = algorithm.server, parts_of(tensors, PAYLOAD)
    model = {name: t for name, t in tensors.items() if not name.startswith(PAYLOAD)}
    trained = [name for name, p in algorithm.named_parameters() if p.requires_grad and name in server.parameters]
    uploaded = algorithm.uploaded_buffers()
    check_tensors(model, {name: server.model()[name] for name in (*trained, *uploaded)}, "weights and buffers")
    check_tensors(payload, {}, "tensors of the payload")
    parameters, buffers = ({name: model[name] for name in names} for names in (trained, uploaded))
    return ClientUpdate(report.client, parameters, buffers, report.num_samples, report.num_steps, payload)


def moments_of_two(algorithm: FederatedAlgorithm, dtype: torch.dtype) -> dict[str, Moments]:
    """The batch-norm moments of two images: the layers, types and numbers of values that clients' moments must have.

    Args:
        algorithm: The working module, in the context in which moments are measured.
        dtype: Of the images.
    """
    device = next(iter(algorithm.server.parameters.values())).device
    return local_moments(algorithm, [torch.zeros((2, *(algorithm.in_shape or ())), dtype=dtype, device=device)])


def first_optimizer_state(trainer: FederatedTrainer) -> State:
    """Tensors of the names, shapes and types that a client's optimizer has after a step; they have no content.

    The configured optimizer makes a step from gradients of zero on other weights of the same shapes.

    Args:
        trainer: Has the weights, and how their optimizer is made.
    """
    weights = [torch.zeros_like(p).requires_grad_() for p in trainer.algorithm.parameters() if p.requires_grad]
    optimizer = build_optimizer(trainer.algorithm.optimizer_factory, weights, "model.optimizer")
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    return {name: t.to("meta") for name, t in optimizer_state(optimizer).items()}


def check_optimizer(state: State, expected: State, before: State) -> None:
    """Refuse an optimizer state that the next client of the slot could not load.

    A weight that no step has given a gradient has no state. All others have the whole state, and so has every weight
    whose state the client was sent.

    Args:
        state: The tensors of the message by the number of the weight and their own name.
        expected: What :func:`first_optimizer_state` returns; empty if the server keeps no optimizer states.
        before: The state that the client was sent.

    Raises:
        MessageError: If the server keeps no such state, or a tensor is missing, unknown, not finite, or of another
            shape or type.
    """
    if state and not expected:
        raise MessageError("it has an optimizer state, which stays at the client")
    numbers = {name.partition(".")[0] for name in (*state, *before)}
    wanted = {name: t for name, t in expected.items() if name.partition(".")[0] in numbers}
    check_tensors(state, wanted, "tensors of the optimizer")
    if not is_finite(state.values()):
        wrong = next(name for name, t in state.items() if not is_finite([t]))
        raise MessageError(f"{wrong!r} of its tensors of the optimizer is not finite")
