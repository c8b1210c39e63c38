"""pfl-research: its PyTorch model on the simulated backend, as in its benchmarks; one process.

python benchmarks/peers/pfl_peer.py --network lr
"""

from __future__ import annotations

import numpy as np
import torch
import workload
from pacer import Pacer, network_argument
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

torch.set_num_threads(1)
np.random.seed(0)  # pfl draws its users from NumPy's global state
name = network_argument()


class Network(torch.nn.Module):
    """A network with the two methods that pfl requires."""

    def __init__(self) -> None:
        super().__init__()
        self.network = workload.network(name)

    def loss(self, x: torch.Tensor, y: torch.Tensor, is_eval: bool = False) -> torch.Tensor:
        """Mean cross-entropy."""
        self.train(not is_eval)
        return torch.nn.functional.cross_entropy(self.network(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor, is_eval: bool = True) -> dict[str, Weighted]:
        """The loss."""
        return {"loss": Weighted(float(self.loss(x, y, is_eval)) * len(y), len(y))}


class Pause(TrainingProcessCallback):
    """Waits after each round."""

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Wait."""
        pacer.pause()
        return False, Metrics()


x, y = workload.tensors()
module = Network()
pacer = Pacer(lambda: workload.loss(module.network))
model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
users = get_user_sampler("minimize_reuse", list(range(workload.CLIENTS)))
data = FederatedDataset(lambda user: Dataset([x[workload.client(user)], y[workload.client(user)]]), users)
backend = SimulatedBackend(data, data, postprocessors=[WeightByUser()])
rounds = NNAlgorithmParams(
    central_num_iterations=10**9, evaluation_frequency=10**9, train_cohort_size=workload.COHORT, val_cohort_size=0
)
training = NNTrainHyperParams(
    local_num_epochs=1, local_learning_rate=workload.rate(name), local_batch_size=workload.BATCH
)
pacer.pause()
FederatedAveraging().run(
    rounds, backend, model, training, NNEvalHyperParams(local_batch_size=None), callbacks=[Pause()]
)
