"""What the CPU seconds of SemiFL buy: accuracy and seconds by local epochs and mix loss, and of anchors.

``semifl_digits.yaml`` on the digits (50 labels at the server) and on 2,000 images of MNIST and Fashion-MNIST (100
labels, width 8), without ``LabelsAlone``. The anchors have the same labels, views, images and test images, and no
federation: the labels alone, FixMatch on the pooled images in plain PyTorch (600 steps of 10 + 70 images), and label
spreading on pixels. Appends a row for each run to the results; a row that is there is not run again. One thread.

    OMP_NUM_THREADS=1 python benchmarks/learning.py data
"""

from __future__ import annotations

import sys
import time
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any

import torch
from sklearn.semi_supervised import LabelSpreading
from torch import Tensor
from torch.nn import functional as F

import papers
from lightning_fedssl import CNN, Experiment, LocalData, sampling

PATH = papers.RESULTS / "learning.csv"
SMALL = {"data.num_labels": 100, "data.max_train_images": 2000, "model.network.init_args.width": 8}
DATA: dict[str, dict[str, Any]] = {"digits": {}, "fashion_mnist": SMALL, "mnist": SMALL}
MOMENTS = {"trainer.callbacks": [{"class_path": "StaticBatchNorm", "init_args": {"source": "moments"}}]}
ARMS: dict[str, dict[str, Any]] = {
    "5 epochs x 30 rounds": MOMENTS,
    "5 epochs x 30 rounds, no mix": MOMENTS | {"model.mix_weight": 0},
    "2 epochs x 30 rounds": MOMENTS | {"model.client_epochs": 2},
    "1 epoch x 60 rounds": MOMENTS | {"model.client_epochs": 1, "trainer.max_rounds": 60},
    **{name: {} for name in ("labels alone", "FixMatch, pooled", "label spreading, pooled")},
}


def accuracy(arm: str, dataset: str, keys: dict[str, Any]) -> float:
    """The test accuracy of a run."""
    config = "supervised_digits.yaml" if arm == "labels alone" else "semifl_digits.yaml"
    trainer, model, data = Experiment.from_config(config, keys, {"data.dataset": dataset}, DATA[dataset], ARMS[arm])
    if "pooled" not in arm:
        trainer.fit(model, data)
        return float(trainer.callback_metrics["test/accuracy"])
    data.setup()
    server, tests = data.local_data(sampling.SERVER, 1), torch.cat([x for x, _ in data.evaluation_batches("test")])
    pool = torch.cat([data.local_data(client, 1).unlabeled for client in range(data.num_clients)])
    torch.manual_seed(keys["seed_everything"])
    if arm == "FixMatch, pooled":
        found = fixmatch(server, pool, tests, 32 if dataset == "digits" else 8)
    else:
        pixels = server.plain(torch.cat([server.labeled, pool])).flatten(1)
        known = torch.cat([server.labels, torch.full((len(pool),), -1)])
        model = LabelSpreading(kernel="knn", n_neighbors=7, alpha=0.2, max_iter=100).fit(pixels, known)
        found = torch.from_numpy(model.predict(tests.flatten(1)))
    return float((found == data.test_labels).double().mean())


def fixmatch(server: LocalData, pool: Tensor, tests: Tensor, width: int) -> Tensor:
    """The classes that FixMatch on pooled images gives the test images."""
    network = CNN(10, tuple(tests.shape[1:]), width, "batch")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.03, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
    for _ in range(600):
        mine, others = torch.randint(len(server.labels), (10,)), pool[torch.randint(len(pool), (70,))]
        rows, draws = torch.cat([server.labeled[mine], others]), torch.randint(2**62, (2, 80))
        weak = server.views.weak(server.images[rows], draws[0])
        strong = server.views.strong(server.images[others], draws[1, 10:])
        labeled, guessed, trained = network(torch.cat([weak, strong])).split([10, 70, 70])
        confidence, classes = guessed.detach().softmax(1).max(1)
        losses = F.cross_entropy(trained, classes, reduction="none") * (confidence >= 0.95)
        optimizer.zero_grad()
        (F.cross_entropy(labeled, server.labels[mine]) + losses.mean()).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return torch.cat([network.eval()(part).argmax(1) for part in tests.split(250)])


def main() -> None:
    """Append the rows that the file does not have."""
    keys = {"data.root": sys.argv[1], "trainer.devices": 1, "trainer.enable_progress_bar": False}
    for seed, dataset, arm in product(range(3), DATA, ARMS):
        key = {"data": dataset, "arm": arm, "seed": str(seed)}
        if not papers.is_known(PATH, key):
            with TemporaryDirectory() as folder:
                of_run = keys | {"seed_everything": seed, "trainer.default_root_dir": folder, "trainer.logger": False}
                began = time.process_time()
                key["accuracy"] = f"{accuracy(arm, dataset, of_run):.4f}"
            papers.append(PATH, key | {"cpu_seconds": f"{time.process_time() - began:.1f}"})


if __name__ == "__main__":
    main()
