"""The steps of a SemiFL round with WRN-28-2 as a JAX program: ``jit``, ``vmap`` over clients, ``scan``.

The yardstick for a GPU: the same steps as ``configs/semifl_cifar10_4000.yaml`` (10 clients with 230 steps on two passes
of 10 images, 80 server steps of 250), on random images that are ready; no views, statistics, evaluation or checks. It
needs the package ``jax`` alone, and prints the seconds of the second round.

    python benchmarks/peers/jax_semifl.py
    python benchmarks/peers/jax_semifl.py --tiny
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Params = dict[str, Any]


def init(key: Any, depth: int, widen: int) -> Params:
    """Weights of WRN-depth-widen for 10 classes."""

    def kernel(size: int, channels_in: int, channels: int) -> Any:
        nonlocal key
        key, now = jax.random.split(key)
        return jax.random.normal(now, (size, size, channels_in, channels)) * (2 / (size * size * channels)) ** 0.5

    def norm(channels: int) -> Params:
        return {"scale": jnp.ones(channels), "bias": jnp.zeros(channels)}

    widths, blocks = [16, 16 * widen, 32 * widen, 64 * widen], []
    for before, width in itertools.pairwise(widths):
        for index in range((depth - 4) // 6):
            source = before if index == 0 else width
            block = {"norm1": norm(source), "conv1": kernel(3, source, width)}
            block |= {"norm2": norm(width), "conv2": kernel(3, width, width)}
            blocks.append(block | ({"shortcut": kernel(1, source, width)} if source != width else {}))
    head = kernel(1, widths[-1], 10)[0, 0]
    return {"stem": kernel(3, 3, 16), "blocks": blocks, "norm": norm(widths[-1]), "head": head, "bias": jnp.zeros(10)}


def convolve(x: Any, kernel: Any, stride: int = 1) -> Any:
    """A convolution of images ``(batch, height, width, channels)``."""
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def normalised(x: Any, norm: Params) -> Any:
    """Batch norm by the statistics of the batch, and ReLU."""
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return jax.nn.relu((x - mean) * lax.rsqrt(variance + 1e-5) * norm["scale"] + norm["bias"])


def logits(params: Params, x: Any) -> Any:
    """The network."""
    x = convolve(x, params["stem"])
    for index, block in enumerate(params["blocks"]):
        stride = 2 if index and "shortcut" in block else 1
        a = normalised(x, block["norm1"])
        out = convolve(normalised(convolve(a, block["conv1"], stride), block["norm2"]), block["conv2"])
        x = out + (convolve(a, block["shortcut"], stride) if "shortcut" in block else x)
    return normalised(x, params["norm"]).mean((1, 2)) @ params["head"] + params["bias"]


def cross_entropy(found: Any, y: Any) -> Any:
    """Of each image."""
    return -jnp.take_along_axis(jax.nn.log_softmax(found), y[:, None], 1)[:, 0]


def client_loss(params: Params, batch: Params) -> Any:
    """L_fix + L_mix."""
    mixed = batch["ratio"] * batch["weak"] + (1 - batch["ratio"]) * batch["mix"]
    found = logits(params, mixed)
    both = batch["ratio"] * cross_entropy(found, batch["y"]) + (1 - batch["ratio"]) * cross_entropy(found, batch["z"])
    return cross_entropy(logits(params, batch["strong"]), batch["y"]).mean() + both.mean()


def server_loss(params: Params, batch: Params) -> Any:
    """Cross-entropy."""
    return cross_entropy(logits(params, batch["weak"]), batch["y"]).mean()


def trained(loss: Any, params: Params, batches: Params) -> Any:
    """Weights after a step of SGD for each batch, and the losses."""

    def step(state: Any, batch: Params) -> Any:
        params, momenta = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        factor = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
        grads = jax.tree.map(lambda g, p: g * factor + 5e-4 * p, grads, params)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, grads)
        params = jax.tree.map(lambda p, m, g: p - 0.03 * (g + 0.9 * m), params, momenta, grads)
        return (params, momenta), value

    (params, _), losses = lax.scan(step, (params, jax.tree.map(jnp.zeros_like, params)), batches)
    return params, losses


def random_batches(key: Any, shape: tuple[int, ...], side: int) -> Params:
    """Images and labels, ``(..., batch, side, side, 3)``."""
    keys = jax.random.split(key, 5)
    names = ("strong", "weak", "mix")
    images = {n: jax.random.normal(k, (*shape, side, side, 3)) for n, k in zip(names, keys[:3], strict=True)}
    y = jax.random.randint(keys[3], shape, 0, 10)
    return {**images, "y": y, "z": y[..., ::-1], "ratio": jax.random.uniform(keys[4], (*shape[:-1], 1))[..., 0]}


def main() -> None:
    """Time the second round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a trial")
    tiny = parser.parse_args().tiny
    sizes = (2, 3, 4, 2, 6, 8) if tiny else (10, 230, 10, 80, 250, 32)
    clients, steps, images, server_steps, server_images, side = sizes
    params = init(jax.random.key(0), *((10, 1) if tiny else (28, 2)))
    of_clients = random_batches(jax.random.key(1), (clients, steps, images), side)
    of_server = random_batches(jax.random.key(2), (server_steps, server_images), side)
    own = {name: of_server[name] for name in ("weak", "y")}
    at_clients = jax.jit(jax.vmap(lambda params, batches: trained(client_loss, params, batches), (None, 0)))
    at_server = jax.jit(lambda params, batches: trained(server_loss, params, batches))
    seconds: dict[str, float] = {}
    for _ in range(2):
        for name, function, batches in (("stacked steps", at_clients, of_clients), ("server steps", at_server, own)):
            began = time.perf_counter()
            jax.block_until_ready(function(params, batches))
            seconds[name] = time.perf_counter() - began
    parts = "; ".join(f"{name} {value:.3f}" for name, value in seconds.items())
    card, total = jax.devices()[0].device_kind, sum(seconds.values())
    print(f"semifl_cifar10_4000,JAX {jax.__version__},{card},{total:.3f} s a round,{parts}")


if __name__ == "__main__":
    main()
