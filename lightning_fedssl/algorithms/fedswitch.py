"""FedSwitch-style: pseudo-labels from the student or from an EMA teacher, depending on a client's
data.

J. Zhao, S. Ghosh, A. Bharadwaj, C.-Y. Ma, "When does the student surpass the teacher? Federated
Semi-supervised Learning with Teacher-Student EMA", arXiv 2301.10114.

No code is published. This is an interpretation of the abstract and of the description by Sun et al.
(arXiv 2307.15870): a federated teacher-student pair with an EMA teacher, teachers that are adapted
at the clients, a switch between teacher and student, stateless clients, little additional
communication, and evaluation of the global teacher. **The rule of the switch and every number are
ours**: call the results "FedSwitch-style".

A round:

1. the server trains the global student on its labelled images; after every step the teacher
   follows, ``teacher <- a teacher + (1 - a) student`` with ``a = min(1 - 1/(t + 1), gamma)`` at its
   t-th step of the run;
2. the student is sent to the drawn clients. Each predicts its images with the student, and computes
   the divergence of the mean prediction from uniform, ``D = KL(p || uniform)``. If D is at most
   beta, the student labels the client's images. Otherwise the data are probably skewed; the client
   also downloads the global teacher, which labels its images;
3. a step trains the strong view with the pseudo-label of the weak view, if it is confident, as
   FixMatch does. After each step a local teacher is updated with a constant decay, ``teacher <-
   gamma_c teacher + (1 - gamma_c) student``; with the decay of the server's teacher it would be
   equal to the student after one step;
4. the students are averaged with equal weights, batch-norm statistics included; local teachers are
   discarded.

The teacher helps where data are skewed, and its download costs communication. Therefore skewed
clients switch to the teacher, and the decision uses the student, which every client has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_fedssl.algorithms.common import checks
from lightning_fedssl.algorithms.fixmatch import FixMatch
from lightning_fedssl.data.local_data import LocalData
from lightning_fedssl.functional.averaging import State
from lightning_fedssl.functional.batch_norm import evaluating
from lightning_fedssl.functional.dictionaries import exclude, remove_prefix, starting_with
from lightning_fedssl.functional.pseudo_labels import PseudoLabels, pseudo_label, skew_of
from lightning_fedssl.functional.schedules import Cosine, Schedule
from lightning_fedssl.local_work import LocalWork
from lightning_fedssl.models.teacher import Teacher
from lightning_fedssl.state import Batch
from lightning_fedssl.storage.hyperparameters import hyperparameters

if TYPE_CHECKING:
    from lightning_fedssl.round import Federation

_TEACHER = "teacher."


@hyperparameters
class FedSwitch(FixMatch):
    """FedSwitch-style training with its ablations: ``beta: 0`` always takes the teacher, ``beta:
    .inf`` the student.

    Args:
        beta: The largest divergence, in nats, for which the student labels a client's images. A
            uniform distribution over nine of ten classes has 0.105, over five 0.693. The default is
            arbitrary: tune it.
        teacher_decay: gamma, the largest decay of the global teacher.
        client_teacher_decay: gamma_c, the decay of the local teachers; null: they do not change.
        client_steps: K_u, steps of a client in a round; with 0 no client trains.
        server_steps: E_s, steps of the server in a round.
        client_weighting: A client's weight in the mean: its number of ``samples``, or ``uniform``.
        schedule: The learning rate over the rounds; by default a cosine from 1 to a quarter.
        label_mode: How a batch is labelled, as in FixMatch.
    """

    no_personal = "sends a teacher, which has all weights"
    needs = "one class"
    labels_at = "server"
    no_static_batch_norm = checks.HAS_TEACHER

    beta: float = 0.1
    teacher_decay: float = 0.99
    client_teacher_decay: float | None = 0.99
    client_steps: int | None = 50
    server_steps: int | None = 50
    client_weighting: Literal["samples", "uniform"] = "uniform"
    label_mode: Literal["train", "eval"] = "eval"

    def default_schedule(self) -> Schedule:
        """A cosine from 1 to a quarter."""
        return Cosine(final=0.25)

    def check_arguments(self) -> None:
        """Check the arguments, and set what follows from them."""
        super().check_arguments()
        checks.require(
            self.server_phase == "after",
            "server_phase",
            self.server_phase,
            "the server trains first",
        )
        remedy = "give 0 (always the teacher) or more; .inf is always the student"
        checks.require(self.beta >= 0, "beta", self.beta, remedy)
        checks.decay(self, "teacher_decay", "client_teacher_decay")

    def build_parts(self) -> None:
        """Build a teacher that is initially a copy of the network."""
        self.teacher = Teacher(self.students())

    def students(self) -> dict[str, nn.Module]:
        """The modules that the teacher follows, by name."""
        return {"network": self.network}

    def configure_callbacks(self) -> list[Callback]:
        """Update the teacher after every step of the server."""
        from lightning_fedssl.callbacks import EMATeacher

        return [EMATeacher(self.teacher_decay)]

    def broadcast(self, client: int) -> State:
        """The student; the teacher is an extra download of the clients that need it."""
        return exclude(self.server.model(), self.global_teacher())

    def evaluated_model(self) -> State:
        """The global teacher under the names of the network."""
        return remove_prefix(_TEACHER, self.global_teacher())

    def global_teacher(self) -> State:
        """The global teacher's weights and buffers."""
        return starting_with(_TEACHER, self.server.model())

    def uploaded_buffers(self) -> list[str]:
        """The buffers of the student."""
        return [name for name in super().uploaded_buffers() if not name.startswith(_TEACHER)]

    # What a client does.

    def on_client_start(self, data: LocalData) -> LocalWork:
        """Choose the model that labels. It is stated by the name of the weak views in the batch."""
        work = super().on_client_start(data)
        if not work.num_steps or not self.prefers_teacher(data):
            return work

        def batch(step: int) -> Batch:
            views = dict(work.batch(step))
            return {"x_teacher": views.pop("x_weak"), **views}

        return replace(work, batch=batch, extra_download=self.global_teacher())

    def prefers_teacher(self, data: LocalData) -> bool:
        """Whether the teacher labels the client's images: the divergence of the received student is
        above beta.
        """
        with evaluating(self):
            logits = torch.cat([self(data.plain(part)) for part in data.unlabeled.split(_PASS)])
        value = float(skew_of(logits))
        self.log("client/divergence", value)
        self.log("client/from_teacher", float(value > self.beta))
        return value > self.beta

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Update the local teacher with the result of the previous step, then compute FixMatch's
        loss.
        """
        if "x_teacher" in batch and self.client_teacher_decay is not None and batch_idx:
            self.teacher.follow(self.students(), self.client_teacher_decay)
        return super().training_step(batch, batch_idx)

    @torch.no_grad()
    def label_batch(self, batch: Batch) -> PseudoLabels | None:
        """Label the weak views by the model that their name states."""
        if "x_teacher" not in batch:
            return super().label_batch(batch)
        return pseudo_label(self.teacher["network"](batch["x_teacher"]), self.threshold)

    # What the server does.

    def round(self, federation: Federation) -> None:
        """Train the server, then the clients.

        The server does not train again after the last round.
        """
        federation.train_server()
        self.aggregate(self.accumulate(federation.train_clients()))


_PASS = 500
"""Images per forward pass without gradients."""
