"""The base classes of this package's networks, the pooling that they share, and the function that
builds the configured network for the data.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from lightning_fedssl.functional.batch_norm import batch_norm_layers, evaluating
from lightning_fedssl.functional.dictionaries import first_number, select
from lightning_fedssl.storage.named_value import unwrapped

InShape = tuple[int, ...]
"""Shape of one sample: ``(channels, height, width)`` of an image, ``(channels, time)`` of a signal,
``(features,)``."""

Layers = list[tuple[str, nn.Module]]
"""Layers by name, in the order in which they are applied."""


class Network(nn.Module):
    """Base class of networks: images ``(batch, channels, height, width)`` to logits ``(batch,
    num_classes)``.

    A configuration names a derived class by its bare name (``network: MLP``), and other modules by
    their class path. A constructor takes ``num_classes`` and ``in_shape``, which
    :func:`build_network` sets from the data. All other arguments come from the configuration.
    Initial weights are drawn from torch's global generator.
    """

    def own_name(self, name: str) -> str:
        """This network's name of a tensor, for a name as torchvision or timm writes it.

        Others are returned unchanged.

        Args:
            name: A tensor's name in a file of weights.
        """
        return name


class LayeredNetwork(Network):
    """Base class of networks that are a sequence of layers, which split learning can split."""

    def chain(self) -> Layers:
        """The layers by name, in the order in which they are applied: all children, in the order in
        which they are registered, if it is not overridden.
        """
        return list(layers_inside(self))

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, num_classes)`` of images ``(batch, channels, height, width)``."""
        for _, layer in self.chain():
            x = layer(x)
        return x


def layers_inside(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children of a module in order; those of an ``nn.Sequential`` among them take its place.

    A layer that is registered twice is applied twice. An ``nn.Sequential`` with a forward pass of
    its own is one layer.

    Args:
        module: The module.
        prefix: What the names begin with.
    """
    for name, child in module.named_modules(remove_duplicate=False):
        if not name or "." in name:
            continue
        path = f"{prefix}{name}"
        if applies_in_order(child):
            yield from layers_inside(child, f"{path}.")
        else:
            yield path, child


def applies_in_order(module: nn.Module) -> bool:
    """Whether a module's forward pass is that of its layers, one after another."""
    return type(module).forward is nn.Sequential.forward


class GlobalAverage(nn.Module):
    """The mean of each channel: ``(batch, channels, height, width)`` to ``(batch, channels)``."""

    def forward(self, x: Tensor) -> Tensor:
        """Means ``(batch, channels)`` of a feature map ``(batch, channels, height, width)``."""
        return x.mean((2, 3))


def check_pixels(name: str, in_shape: InShape, smallest: int) -> None:
    """Refuse images of which a network's layers would leave nothing.

    Args:
        name: The network, for the message.
        in_shape: Shape of one image.
        smallest: The smallest height and width, in pixels.

    Raises:
        ValueError: If the images are smaller.
    """
    if min(in_shape[1:]) < smallest:
        raise ValueError(
            f"model.network: {name} takes images from {smallest} x {smallest} pixels up, not "
            f"{in_shape[1]} x {in_shape[2]}"
        )


def max_pool(x: Tensor) -> Tensor:
    """``F.max_pool2d(x, 2)``.

    torch's CPU kernel compares one number at a time, and takes as long as a convolution of a small
    network. Labelling, statistics and evaluation need no gradient: there, larger numbers of
    neighbours are taken for whole rows.

    Args:
        x: ``(batch, channels, height, width)``.

    Returns:
        ``(batch, channels, height // 2, width // 2)``.
    """
    if torch.is_grad_enabled() or x.device.type != "cpu" or not x.is_contiguous():
        return F.max_pool2d(x, 2)
    height, width = (size // 2 * 2 for size in x.shape[-2:])
    pairs = torch.maximum(x[..., :height, 0:width:2], x[..., :height, 1:width:2])
    return torch.maximum(pairs[..., ::2, :], pairs[..., 1::2, :])


class MaxPool2d(nn.MaxPool2d):
    """:func:`max_pool` as a layer."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, input: Tensor) -> Tensor:
        """The largest of each 2 x 2 pixels, ``(batch, channels, height // 2, width // 2)``."""
        return max_pool(input)


class _OurNetwork(Protocol):
    """A class of this package; its named arguments come from the data, so the configuration has no
    keys for them.
    """

    def __call__(self, *, num_classes: int, in_shape: InShape, in_channels: int) -> Network: ...


class _AnyModule(Protocol):
    """Any module's class, or a function that returns a module."""

    def __call__(self, *, num_classes: int, in_shape: InShape, in_channels: int) -> nn.Module: ...


# This package's classes come first, so that the bare name MLP means ours and not torchvision's. The
# protocols reject a configuration that sets num_classes or in_shape; the Callables accept it.
if TYPE_CHECKING:
    NetworkFactory = Callable[..., nn.Module]  # it may take any of the three named arguments
    """What a parameter ``network`` takes: a :class:`Network` by bare name, any ``torch.nn.Module``
    or function by path."""
else:
    NetworkFactory = _OurNetwork | Callable[[], Network] | _AnyModule | Callable[[], nn.Module]


def build_network(
    factory: Callable[..., nn.Module],
    num_classes: int,
    in_shape: InShape,
    out_shape: InShape | None = None,
) -> nn.Module:
    """Build a network for the data and check once that its output has the right shape.

    The factory is called with those of ``num_classes``, ``in_shape`` and ``in_channels`` that it
    accepts. A factory with ``**kwargs`` (such as torchvision's and timm's functions) gets
    ``num_classes``. The check is a forward pass of two black images in evaluation mode; it draws no
    random number.

    Args:
        factory: A module's class, a function, a partial of either, or a module that is already
            built. A configured function with ``init_args`` arrives as a built module. A built
            module, and what a function returns, is copied, so that no two networks share weights.
        num_classes: Classes of the data.
        in_shape: Shape of one image, ``(channels, height, width)``.
        out_shape: Shape of its output; ``(num_classes,)`` if left out.

    Raises:
        ValueError: The configuration contradicts the data, the network cannot take the images, or
            its output is not ``(2, *out_shape)``.
    """
    if isinstance(factory, nn.Module):
        network = copy.deepcopy(factory)
    else:
        network = _constructed(factory, num_classes, in_shape)
    _check_output(network, out_shape or (num_classes,), in_shape)
    accept_single_values(network)
    return network


def accept_single_values(network: nn.Module) -> list[RemovableHandle]:
    """Let every batch norm of a network train on a single value per channel: it then normalises
    with its buffers, as in evaluation.

    Such a batch is one sample, or one image in a layer of 1x1 pixels, e.g. the last batch of a
    client's epoch. It has no variance; torch refuses it, which would end the run.

    Args:
        network: The network, of any layers; copies of it have the rule, too.

    Returns:
        The handles that take the rule away again.
    """
    layers = batch_norm_layers(network).values()
    return [layer.register_forward_pre_hook(_evaluate_single) for layer in layers]


def _evaluate_single(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    if layer.training and inputs and inputs[0].numel() == inputs[0].shape[1]:
        layer.training = False

        def train_again(*_: object) -> None:
            layer.training = True
            handle.remove()

        handle = layer.register_forward_hook(train_again, always_call=True)


def _constructed(
    factory: Callable[..., nn.Module], num_classes: int, in_shape: InShape
) -> nn.Module:
    """Call the factory; report an error of the constructor as an error of the configuration."""
    try:
        arguments = _arguments(factory, num_classes, in_shape)
        return _unshared(factory, factory(**arguments))
    except Exception as error:
        if str(error).startswith("model."):
            raise  # the constructor's own message names the key
        name = getattr(unwrapped(factory), "__name__", str(factory))
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"model.network: {name} cannot be built: {reason}; change its arguments "
            "(model.network.init_args)"
        ) from error


def _unshared(factory: Callable[..., nn.Module], network: nn.Module) -> nn.Module:
    """A copy of what a function returned: it may return one network for every run."""
    target = unwrapped(factory)
    while isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, type):
        return network
    try:
        return copy.deepcopy(network)
    except RuntimeError:  # weights that torch.nn.utils.weight_norm computes cannot be copied
        return network


def _arguments(
    factory: Callable[..., nn.Module], num_classes: int, in_shape: InShape
) -> dict[str, Any]:
    """The arguments set by the data, as far as the factory accepts them."""
    configured = getattr(factory, "keywords", {}).get("num_classes", num_classes)
    if configured != num_classes:
        raise ValueError(
            f"model.network has num_classes {configured}, but the data have {num_classes} "
            "classes. Leave num_classes, in_shape and in_channels out of model.network.init_args: "
            "the data set them."
        )
    offered = {"num_classes": num_classes, "in_shape": in_shape, "in_channels": in_shape[0]}
    return select(offered, _accepted(unwrapped(factory)))


def _accepted(target: Callable[..., nn.Module]) -> set[str]:
    """Names of the arguments that the target accepts.

    ``**kwargs`` count as accepting the usual ones.
    """
    if getattr(target, "__init__", None) is nn.Module.__init__:
        return set()  # torch's own constructor declares **kwargs but rejects all of them
    parameters = inspect.signature(target).parameters
    accepted = set(parameters)
    if inspect.Parameter.VAR_KEYWORD in [parameter.kind for parameter in parameters.values()]:
        is_ours = isinstance(target, type) and issubclass(target, Network)
        accepted |= {"num_classes", "in_shape"} if is_ours else {"num_classes"}
    return accepted


def _check_output(network: nn.Module, out_shape: InShape, in_shape: InShape) -> None:
    name = type(network).__name__
    num_classes = out_shape[0]
    expected = (2, *out_shape)
    try:
        with evaluating(network):
            output = network(_black_images(network, in_shape))
    except Exception as error:
        raise ValueError(
            f"model.network: {name} cannot take samples of shape {in_shape}: {error}. Choose a "
            "network for this shape, or let its constructor take in_shape or in_channels."
        ) from error
    if not isinstance(output, Tensor):
        raise ValueError(
            f"model.network: {name} gave {type(output).__name__} for two samples of shape "
            f"{in_shape}, and no tensor; let forward return the logits alone, here of shape "
            f"{expected}."
        )
    shape = tuple(output.shape)
    if len(shape) != len(expected):
        raise ValueError(
            f"model.network: {name} gave {shape} for two samples of shape {in_shape}, and not "
            f"{expected}: data.task Segmentation needs logits of every pixel, as UNet has, other "
            "tasks one row of each sample"
        )
    if shape != expected:
        raise ValueError(
            f"model.network: {name} gave {shape} for two samples of shape {in_shape}, but "
            f"{num_classes} classes need {expected}. Set num_classes: {num_classes} in "
            "model.network.init_args, or whatever argument of this network sets the number of its "
            "outputs; where none is accepted there, as for timm.create_model, name a function of "
            "your own with the argument num_classes, which the data set, or train on features "
            "(data.backbone)."
        )


def _black_images(network: nn.Module, in_shape: InShape) -> Tensor:
    parameter = first_number(network.parameters())
    return torch.zeros(2, *in_shape, dtype=parameter.dtype, device=parameter.device)
