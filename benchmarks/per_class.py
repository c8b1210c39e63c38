"""Prints results by class: ``python benchmarks/per_class.py --root data VERSION...``.

VERSION is the folder ``lightning_logs/version_N`` of a run, with ``config.yaml`` and ``checkpoints/last.ckpt``. For
every class the script prints the test accuracy. If clients have unlabelled images, the last model labels them without
augmentation, and the script also prints for every class: the share of its images with a confident label, the share with
the right label (recall), and the share of right labels among the confident labels of that class (purity). A mean over
classes can hide that only images of easy classes get labels.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from lightning_fedssl import Experiment
from lightning_fedssl.algorithm import FederatedAlgorithm
from lightning_fedssl.data.datamodule import FederatedDataModule
from lightning_fedssl.functional.pseudo_labels import pseudo_label

THRESHOLD = 0.95
"""The threshold for methods without one."""


def load(version: Path, root: str) -> tuple[FederatedAlgorithm, FederatedDataModule]:
    """A run's data, and the model that was evaluated at its end; other models of the method, such as teachers, are new.

    Args:
        version: The run's folder.
        root: The data folder.
    """
    _, model, data = Experiment.from_config(version / "config.yaml", {"data.root": root, "ckpt_path": None})
    data.setup("fit")
    checkpoint = torch.load(version / "checkpoints" / "last.ckpt", weights_only=True)
    model.configure_model()
    missing, unknown = model.load_state_dict(checkpoint["state_dict"], strict=False)
    if problem := [*unknown, *(name for name in missing if name.startswith("network."))]:
        raise ValueError(f"{version}: the checkpoint does not fit config.yaml: {problem[0]}")
    return model.eval(), data


@torch.no_grad()
def logits_of(model: FederatedAlgorithm, batches: Iterable[Tensor]) -> Tensor:
    """Logits ``(images, classes)`` of batches of views."""
    return torch.cat([model(batch) for batch in batches])


def unlabeled_views(data: FederatedDataModule, pool: Tensor) -> Iterator[Tensor]:
    """The clients' unlabelled images without augmentation, in batches."""
    local = data.local_data(0, 1)
    return map(local.plain, pool.split(500))


def shares(hits: Tensor, classes: Tensor, num_classes: int) -> list[float]:
    """For each class the share of its entries that are hits, in per cent; NaN for a class without entries.

    Args:
        hits: ``(n,)``, booleans.
        classes: ``(n,)``, the class of each entry.
        num_classes: Number of classes.
    """
    total = classes.bincount(minlength=num_classes)
    return (100 * classes[hits].bincount(minlength=num_classes) / total).tolist()


def table(model: FederatedAlgorithm, data: FederatedDataModule) -> dict[str, list[float]]:
    """Test accuracy, and confidence, recall and purity of the clients' labels, of every class in per cent."""
    batches, labels = zip(*data.evaluation_batches("test"), strict=True)
    truth, k = torch.cat(labels), data.num_classes
    rows = {"test accuracy": shares(logits_of(model, batches).argmax(1) == truth, truth, k)}
    pool = data.unlabeled_pool()
    if not len(pool):
        return rows
    truth = data.true_labels(pool)
    pseudo = pseudo_label(logits_of(model, unlabeled_views(data, pool)), getattr(model, "threshold", THRESHOLD))
    right = pseudo.mask & (pseudo.labels == truth)
    return rows | {
        "labelled with confidence": shares(pseudo.mask, truth, k),
        "labelled rightly (recall)": shares(right, truth, k),
        "right labels (purity)": shares((pseudo.labels == truth)[pseudo.mask], pseudo.labels[pseudo.mask], k),
    }


def main() -> None:
    """Print a table for every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", type=Path)
    parser.add_argument("--root", default="data")
    options = parser.parse_args()
    for version in options.versions:
        model, data = load(version, options.root)
        print(f"\n{version}\n\n| class | {' | '.join(data.spec.class_names)} | mean |")
        print("|---" * (data.num_classes + 2) + "|")
        for name, values in table(model, data).items():
            mean = torch.tensor(values).nanmean().item()
            print(f"| {name} | {' | '.join(f'{value:.1f}' for value in (*values, mean))} |")


if __name__ == "__main__":
    main()
