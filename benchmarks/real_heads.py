"""Classifiers of frozen features and rules of self-training, tried on the development tasks of ``real_tasks.py``; a row
each. Self-training is pooled here, which the federated one equals.

python benchmarks/real_heads.py --wheels wheels --root data --part development --kinds series images \
    --per_class 3 10 --output heads.csv
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from lightning_fedssl import FederatedDataModule
from lightning_fedssl.models.head import logistic_regression
from lightning_fedssl.sampling import SERVER
from real_tasks import append, federation, parser, prepare, reader, wanted

Function = Callable[[Tensor], Tensor]


def classifiers(x: Tensor, y: Tensor, u: Tensor, owners: Tensor) -> Iterator[tuple[str, Function]]:
    """What is compared, by name, as functions from features to classes.

    Args:
        x: Features of the labelled samples ``(n, d)``.
        y: Their labels ``(n,)``.
        u: Features of the clients' samples ``(m, d)``.
        owners: The client of each of these ``(m,)``.
    """
    fitted = LogisticRegression(max_iter=200).fit(x, y)
    yield "logistic regression of scikit-learn", lambda z: torch.from_numpy(fitted.predict(z))
    heads = {l2: logistic_regression(x, y, int(y.max()) + 1, l2) for l2 in (0.01, 0.1, 1.0)}
    for l2, (weight, bias) in heads.items():
        yield f"head, L2 {l2}", lambda z, w=weight, b=bias: (z @ w.T + b).argmax(1)  # type: ignore[misc]
    masks = (torch.rand(8, x.shape[1], generator=torch.Generator().manual_seed(0)) < 0.5).double()
    several = [logistic_regression(x * mask, y, int(y.max()) + 1) for mask in masks]
    mean = torch.stack([(u * m @ w.T + b).softmax(1) for m, (w, b) in zip(masks, several, strict=True)]).mean(0)
    of = one_hot(owners).double()
    rules: dict[str, Function] = {
        "labels by confidence": lambda p: p,
        "threshold 0.8": lambda p: p * (p.amax(1, keepdim=True) >= 0.8),
        "shares drawn half-way to equal ones": lambda p: p * (1 + 1 / (p.shape[1] * p.mean(0))),
        "labels by an ensemble of heads": lambda p: mean,
        "divided by class means of a client": lambda p: p / (of @ (of.T @ p / of.sum(0)[:, None].clamp_min(1))),
    }
    for name, rule in rules.items():
        weight, bias = self_trained(*heads[0.1], x, y, u, rule)
        yield f"self-training, {name}", lambda z, w=weight, b=bias: (z @ w.T + b).argmax(1)  # type: ignore[misc]


def self_trained(w: Tensor, b: Tensor, x: Tensor, y: Tensor, u: Tensor, rule: Function) -> list[Tensor]:
    """The classifier after 50 rounds of ``SelfTraining`` with the rate and decay of the presets."""
    weights = [w, b]
    for _ in range(50):
        w, b = (part.detach().requires_grad_() for part in weights)
        aligned = rule((u @ w.T + b).softmax(1).detach())
        confidence, guess = (aligned / aligned.sum(1, keepdim=True).clamp_min(1e-9)).max(1)
        others = confidence @ cross_entropy(u @ w.T + b, guess, reduction="none") / confidence.sum().clamp_min(1e-9)
        loss = (cross_entropy(x @ w.T + b, y) + others) / 2 + 0.05 * (w.square().sum() + b.square().sum())
        weights = [part - 0.03 * g for part, g in zip((w, b), torch.autograd.grad(loss, (w, b)), strict=True)]
    return [part.detach() for part in weights]


def features(data: FederatedDataModule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features and labels of the server, features of the clients and their owners."""
    server = data.local_data(SERVER, 1)
    clients = [data.local_data(client, 1) for client in range(data.num_clients)]
    owners = torch.cat([torch.full((len(c.unlabeled),), c.party) for c in clients])
    u = torch.cat([c.plain(c.unlabeled) for c in clients])
    return server.plain(server.labeled).double(), server.labels, u.double(), owners


def main() -> None:
    """Append a row for each run and classifier; with skewed clients, for those that depend on the clients."""
    options = parser().parse_args()
    for kind, run in wanted(options):
        pool = reader(kind, run.task, options.wheels, options.root)()
        arrays = federation(pool, run.per_class, run.clients == "skewed", run.seed) or {}
        with TemporaryDirectory() as folder:
            data = prepare(kind, arrays, run, options.wheels / "lite0.safetensors", Path(folder))[2]
            data.setup()
        for name, predict in classifiers(*features(data)):
            if run.clients == "alike" or "client" in name:
                right = torch.cat([predict(x.double()) == y for x, y in data.evaluation_batches("test")])
                append(options.output, [*run, name, f"{100 * float(right.double().mean()):.1f}"])


if __name__ == "__main__":
    main()
