"""FedJAX: federated averaging compiled with jit, its default on one device.

python benchmarks/peers/fedjax_peer.py --network lr
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
import workload
from pacer import Pacer, network_argument

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"  # JAX reads it once
jax.tree_map = jax.tree_util.tree_map  # FedJAX 0.0.17 uses a name that JAX has removed

import fedjax  # noqa: E402
import haiku as hk  # noqa: E402

name = network_argument()
pixels, labels = workload.images()
x, y = (pixels / np.float32(255)).transpose(0, 2, 3, 1).copy(), labels.astype(np.int32)


def forward(batch: Any) -> Any:
    """Logits."""
    if name == "lr":
        return hk.Sequential([hk.Flatten(), hk.Linear(workload.CLASSES)])(batch["x"])
    layers = [
        hk.Conv2D(32, 3, padding="VALID"), jax.nn.relu, hk.Conv2D(64, 3, padding="VALID"), jax.nn.relu,
        hk.MaxPool(2, 2, "VALID"), hk.Flatten(), hk.Linear(128), jax.nn.relu, hk.Linear(workload.CLASSES),
    ]  # fmt: skip
    return hk.Sequential(layers)(batch["x"])


model = fedjax.create_model_from_haiku(
    transformed_forward_pass=hk.transform(forward),
    sample_batch={"x": x[:1], "y": y[:1]},
    train_loss=lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits),
    eval_metrics={"loss": fedjax.metrics.CrossEntropyLoss()},
)
data = fedjax.InMemoryFederatedData(
    {i: {"x": x[workload.client(i)], "y": y[workload.client(i)]} for i in range(workload.CLIENTS)}
)
algorithm = fedjax.algorithms.fed_avg.federated_averaging(
    fedjax.model_grad(model),
    fedjax.optimizers.sgd(workload.rate(name)),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(workload.BATCH),
)
state = algorithm.init(model.init(jax.random.PRNGKey(0)))
sampler = fedjax.client_samplers.UniformGetClientSampler(data, workload.COHORT, seed=0)


def global_loss() -> float:
    """Loss of the global model."""
    batches = fedjax.ClientDataset({"x": x, "y": y}).batch(fedjax.BatchHParams(250))
    return float(fedjax.evaluate_model(model, state.params, batches)["loss"])


pacer = Pacer(global_loss)
while True:
    pacer.pause()
    state, _ = algorithm.apply(state, sampler.sample())
    jax.block_until_ready(state.params)
