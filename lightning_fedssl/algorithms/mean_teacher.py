"""Fed-MT: federated averaging with a Mean Teacher at every client.

A. Tarvainen, H. Valpola, "Mean teachers are better role models: Weight-averaged consistency targets improve
semi-supervised deep learning results", NIPS 2017, arXiv 1703.01780, combined with FedAvg as a baseline of Fed-SHVR
(arXiv 2111.00010, section V), which names the combination and specifies nothing; all details are ours.

A round:

1. the server sends theta to the clients; a client's student and teacher start from it;
2. before each of tau_k steps the teacher follows the student, ``teacher <- decay teacher + (1 - decay) student`` with
   decay ``min(1 - 1/(s + 1), 0.99)`` at step s = 0, 1, ..; the student then steps on
   ``CE(labelled) + alpha_0 mean over images of (1/C) ||softmax(student) - softmax(teacher)||^2``;
3. the students are uploaded and averaged, weighted by the number of images; the teachers are dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.algorithms.paired_work import Ramp, RampShape, check_labeled_clients, local_steps, paired_work
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.state import Batch, LocalWork

if TYPE_CHECKING:
    from lightning_fedssl.data.datamodule import FederatedDataModule

_TEACHER = "teacher."


class Teacher(nn.Module):
    """A copy of a network's weights as buffers, so that whatever stacks or moves a module's tensors takes them along.

    Args:
        network: The student.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.names = [name for name, _ in network.named_parameters()]
        for index, weight in enumerate(network.parameters()):
            self.register_buffer(f"weight_{index}", weight.detach().clone(), persistent=False)

    def weights(self) -> State:
        """The teacher's weights by the network's names."""
        return {name: self.get_buffer(f"weight_{index}") for index, name in enumerate(self.names)}

    @torch.no_grad()
    def follow(self, network: nn.Module, decay: float) -> None:
        """Move towards the student: ``decay * teacher + (1 - decay) * student``.

        Args:
            network: The student.
            decay: 0 copies the student.
        """
        for own, weight in zip(self.weights().values(), network.parameters(), strict=True):
            # not lerp_, for which vmap has no rule
            own.copy_(decay * own + (1 - decay) * weight.detach() if decay else weight.detach())


class MeanTeacher(FederatedAlgorithm):
    """FedAvg with a Mean Teacher at clients that hold labelled and unlabelled images.

    A client without images of one kind drops the term it has none for.

    Args:
        alpha0: Final weight of the consistency loss.
        ramp_epochs: Local epochs over which the weight grows from 0; 0 for its final value from the start.
        ramp_shape: ``linear``, or ``exponential``: ``exp(-5 (1 - x)^2)``.
        decay: Largest decay of the teacher.
        client_epochs: E.
        kwargs: The arguments every algorithm takes.
    """

    def __init__(
        self,
        alpha0: float = 1.0,
        ramp_epochs: float = 50,
        ramp_shape: RampShape = "linear",
        decay: float = 0.99,
        client_epochs: float = 2,
        **kwargs: Any,
    ) -> None:
        super().__init__(client_epochs=client_epochs, **kwargs)
        if not 0 <= decay < 1:
            raise ValueError(f"model.decay is {decay}: give a number from 0 to below 1")
        self.ramp = Ramp(alpha0, ramp_epochs, ramp_shape)
        self.decay = decay
        self.teacher: Teacher

    def configure_model(self) -> None:
        """Build the network, and room for a teacher."""
        super().configure_model()
        if not hasattr(self, "teacher"):
            self.teacher = Teacher(self.network)

    def configure_callbacks(self) -> list[Callback]:
        """The spread of tau_k."""
        from lightning_fedssl.callbacks import LocalSteps

        return [LocalSteps()]

    def check_data(self, data: FederatedDataModule) -> None:
        """Labels must be at the clients, and every client needs an image."""
        check_labeled_clients(data, type(self).__name__)

    def broadcast(self, client: int) -> State:
        """The global model; a teacher is never sent."""
        return _without_teacher(super().broadcast(client))

    def evaluated_model(self) -> State:
        """The averaged student."""
        return _without_teacher(super().evaluated_model())

    def uploaded_buffers(self) -> list[str]:
        """Those of the student."""
        return [name for name in super().uploaded_buffers() if not name.startswith(_TEACHER)]

    def on_client_start(self, data: LocalData) -> LocalWork:
        """The teacher starts from the received model; draw tau_k batches."""
        self.teacher.follow(self.network, 0.0)
        steps = local_steps(data, self.client_epochs)
        weight = self.ramp.values(data.round, self.client_epochs, steps).to(data.images.device, data.dtype)
        return paired_work(data, steps, unlabeled=lambda _, step: {"alpha0": weight[step]})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """Cross-entropy of the labelled images and the students' distance from the teacher on the unlabelled ones."""
        self.teacher.follow(self.network, min(1 - 1 / (batch_idx + 1), self.decay))
        logits = self(torch.cat([batch[name] for name in ("x", "u") if name in batch]))
        count = len(batch["y"]) if "y" in batch else 0
        terms = [F.cross_entropy(logits[:count], batch["y"])] if count else []
        if "u" in batch:
            distance = (logits[count:].softmax(dim=-1) - self.teach(batch["u"])).square().mean(dim=-1)
            terms.append((batch["alpha0"] * distance).mean())
        return sum(terms[1:], start=terms[0])

    @torch.no_grad()
    def teach(self, u: Tensor) -> Tensor:
        """The teacher's probabilities ``(batch, classes)``; it leaves the student's buffers as they are."""
        buffers = {name: b.clone() for name, b in self.network.named_buffers()}
        logits: Tensor = functional_call(self.network, {**self.teacher.weights(), **buffers}, (u,))
        return logits.softmax(dim=-1)


def _without_teacher(state: State) -> State:
    return {name: t for name, t in state.items() if not name.startswith(_TEACHER)}
