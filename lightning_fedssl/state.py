"""The values that move between the server and the clients, and those each side keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedssl.functional.averaging import State, sizes_of
from lightning_fedssl.functional.pseudo_labels import PseudoLabels

Batch = dict[str, Tensor]
"""One step's tensors by name, each ``(batch, ...)``."""


@dataclass
class ServerState:
    """What the server holds between phases: the global model and its own optimisation state.

    Attributes:
        parameters: The global weights by name.
        buffers: The global model's buffers by name (normalisation statistics and the like).
        momentum: The server momentum buffer; empty before the first aggregation.
        version: Counts the changes of the weights, so that what is derived from them is computed once.
        extra: Further states that a method keeps at the server, by name.
        sent_version: The version of the weights that every client has been sent already, for static batch norm's
            moments; -1 for none.
    """

    parameters: State
    buffers: State
    momentum: State = field(default_factory=dict)
    version: int = 0
    extra: dict[str, State] = field(default_factory=dict)
    sent_version: int = -1

    @classmethod
    def of(cls, module: nn.Module) -> ServerState:
        """A copy of a module's present weights and buffers; it shares no storage with the module."""
        return cls(
            {name: p.detach().clone() for name, p in module.named_parameters()},
            {name: b.detach().clone() for name, b in module.named_buffers()},
        )

    def update(self, parameters: State | None = None, buffers: State | None = None) -> None:
        """Copy new values into the global model; names left out keep theirs."""
        _copy_into(self.parameters, parameters or {})
        _copy_into(self.buffers, buffers or {})
        self.version += 1

    def to(self, device: torch.device) -> None:
        """Move everything to a device, but the scalars of kept optimizers: a step count may be the host's."""
        self.parameters, self.buffers, self.momentum = (
            {name: t.to(device) for name, t in state.items()}
            for state in (self.parameters, self.buffers, self.momentum)
        )
        self.extra = {
            kind: {n: t.to(device) if t.dim() or not kind.startswith("optimizer") else t for n, t in state.items()}
            for kind, state in self.extra.items()
        }

    def model(self) -> State:
        """Parameters and buffers together: what a client receives by default."""
        return {**self.parameters, **self.buffers}


@dataclass(frozen=True)
class ClientUpdate:
    """What one client sends back. Its tensors are the live model's: valid until the next update is asked for.

    Attributes:
        client: The client's number.
        parameters: Trained weights by name.
        buffers: Buffers that training changed, by name (batch-norm statistics; none for static batch norm).
        num_samples: Images the client trained on, the usual weight.
        num_steps: Local optimizer steps, tau_k.
        payload: Further tensors a method sends.
    """

    client: int
    parameters: State
    buffers: State
    num_samples: int
    num_steps: int
    payload: State = field(default_factory=dict)

    def sizes(self) -> dict[str, int]:
        """Every tensor's bytes by its name; those of the payload as ``payload.name``."""
        payload = {f"payload.{name}": t for name, t in self.payload.items()}
        return sizes_of({**self.parameters, **self.buffers, **payload})


@dataclass(frozen=True)
class LocalWork:
    """What one party does in one round: a number of steps and the batch of each.

    Attributes:
        num_samples: Images trained on, the client's usual weight in the average.
        num_steps: Optimizer steps; 0 means that the client sits out.
        batch: Gives the batch of step 0, 1, ...; called in order.
        pseudo_labels: The labels that the party gave to its unlabelled images, for diagnostics.
        correction: Added to the gradient of every step, after clipping: a control variate, by the weights' names.
        epoch_steps: Steps after which every image has been visited once, for passes over all of the data.
        asked: What a client asks the server for when it has looked at its broadcast; it is loaded, and counted as sent.
    """

    num_samples: int
    num_steps: int
    batch: Callable[[int], Batch]
    pseudo_labels: PseudoLabels | None = None
    correction: State = field(default_factory=dict)
    epoch_steps: int = 0
    asked: State = field(default_factory=dict)

    def limited(self, max_steps: int | None) -> LocalWork:
        """The same work, cut off after ``max_steps`` steps."""
        return self if max_steps is None else replace(self, num_steps=min(self.num_steps, max_steps))

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(step) for step in range(self.num_steps))


CHUNK = 512
"""Images whose views are made at a time: enough to amortise the cost per call, small enough for a processor's cache."""


def epochs_of(
    make_batch: Callable[[Tensor, int, int], Batch],
    order: Callable[[int], Tensor],
    *,
    count: int,
    batch_size: int,
    epochs: float = 0,
    steps: int | None = None,
    pseudo_labels: PseudoLabels | None = None,
) -> LocalWork:
    """Work that goes over ``count`` images in batches, for some epochs or for some steps.

    With ``epochs`` the last, shorter batch of an epoch is kept. With ``steps`` batches are full: an epoch ends when
    fewer images are left than a batch, and the next begins (fewer images than one batch are all taken).

    Views are made for several batches at once and sliced.

    Args:
        make_batch: Called with rows of an epoch ``(n,)``, the epoch (from 0) and the rows' place in the epoch.
        order: The rows of an epoch in the order they are visited, ``(count,)``.
        count: Images of an epoch; 0 gives no steps.
        batch_size: Images per step.
        epochs: E; a fraction ends within an epoch, with at least one step.
        steps: T, in the place of ``epochs``.
        pseudo_labels: Passed on.
    """
    steps_per_epoch, num_steps = _steps(count, batch_size, epochs, steps)
    rows_per_chunk = min(max(1, CHUNK // batch_size), max(1, num_steps)) * batch_size
    current: tuple[int, int] | None = None
    rows, chunk = torch.empty(0), Batch()

    def batch(step: int) -> Batch:
        nonlocal current, rows, chunk
        epoch, step = divmod(step, steps_per_epoch)
        number, offset = divmod(step * batch_size, rows_per_chunk)
        if current is None or current[0] != epoch:
            rows = order(epoch)
        if current != (epoch, number):
            start = number * rows_per_chunk
            chunk = make_batch(rows[start : start + rows_per_chunk], epoch, start)
            current = (epoch, number)
        return {name: t[offset : offset + batch_size] for name, t in chunk.items()}

    return LocalWork(count if num_steps else 0, num_steps, batch, pseudo_labels, epoch_steps=steps_per_epoch)


def _steps(count: int, batch_size: int, epochs: float, steps: int | None) -> tuple[int, int]:
    """Steps of an epoch and in all."""
    if steps is not None:
        return max(1, count // batch_size), steps if count else 0
    per_epoch = math.ceil(count / batch_size)
    return per_epoch, max(1, math.ceil(per_epoch * epochs)) if count and epochs > 0 else 0


def optimizer_state(optimizer: Optimizer) -> State:
    """The tensors an optimizer keeps, by parameter number and name; not copied."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{i}.{name}": value
        for i, p in enumerate(parameters)
        for name, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }


def load_optimizer_state(optimizer: Optimizer, state: State) -> None:
    """Put back what :func:`optimizer_state` gave, as copies on the parameters' devices; an empty state resets it."""
    parameters = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    optimizer.state.clear()
    for key, value in state.items():
        number, name = key.split(".", 1)
        p, group = parameters[int(number)]
        # Step counts stay on the CPU, except for kernels that read them on the device.
        on_device = value.dim() or group.get("fused") or group.get("capturable")
        if value.dim() and value.shape == p.shape:
            # Fused kernels walk through memory: what belongs to a weight must lie there as the weight does.
            optimizer.state[p][name] = torch.empty_like(p, dtype=value.dtype).copy_(value)
        else:
            optimizer.state[p][name] = value.to(p.device if on_device else value.device, copy=True)


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Set every parameter group's learning rate to ``factor`` times the configured one."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def _copy_into(target: State, source: State) -> None:
    if unknown := source.keys() - target.keys():
        raise KeyError(f"the global model has no tensor named {', '.join(sorted(unknown))}")
    if source:
        with torch.no_grad():
            torch._foreach_copy_([target[name] for name in source], list(source.values()))


class LiveTensors:
    """A module's weights and buffers by name. The names are found once, the tensors at every call.

    A module may put a new tensor in the place of a buffer, so the places are kept and not the tensors. The places hold
    for as long as the module has the same layers.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        layers = dict(module.named_modules())
        places = [(name, layers[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in _names(module)]
        self._parameters = [(name, layer._parameters, key) for name, layer, key in places if key in layer._parameters]
        self._buffers = [(name, layer._buffers, key) for name, layer, key in places if key in layer._buffers]

    def parameters(self) -> dict[str, Tensor]:
        """The weights, not detached."""
        return {name: layer[key] for name, layer, key in self._parameters}

    def buffers(self) -> State:
        """The buffers."""
        return {name: layer[key] for name, layer, key in self._buffers}

    def load(self, state: State) -> None:
        """Copy named weights and buffers into the module; names left out keep their values."""
        _copy_into({**self.parameters(), **self.buffers()}, state)


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in (*module.named_parameters(), *module.named_buffers())]


def load_state(module: nn.Module, state: State) -> None:
    """Copy named parameters and buffers into a module; names left out keep their values."""
    LiveTensors(module).load(state)
