"""Memory and images per second of image files in memory, and in the memory-mapped file of ``data.cache_dir``.

Generates JPEG files, then measures each way in a process of its own: what setting up costs, and then random batches
through the weak view. Memory is that of the process above what it held before: anonymous pages, which no other
process can use, and pages of files, which the system drops when it needs the memory.

    python benchmarks/image_cache.py --images 5000
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lightning_fedssl.data import FederatedDataModule

RESULTS = Path(__file__).resolve().parent / "results" / "image_cache.csv"
BATCH = 64
CLASSES = 10


def main() -> None:
    """Generate the files, measure each way, write one row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=5000, help="training images")
    parser.add_argument("--side", type=int, default=224, help="their side in pixels")
    parser.add_argument("--batches", type=int, default=20, help="random batches that are timed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for part, count in (("train", arguments.images), ("test", 2 * CLASSES)):
            write_images(root / "photos" / part, count, arguments.side)
        ways = {"in memory": None, "cache, made": root / "cache", "cache, found": root / "cache"}
        rows = [measure_apart(name, root / "photos", cache, arguments) for name, cache in ways.items()]
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    for row in rows:
        print(", ".join(f"{key} {value}" for key, value in row.items()))


def write_images(folder: Path, count: int, side: int) -> None:
    """JPEG files of smooth random colours with some noise, as large on the disk as photographs of that size."""
    generator = np.random.default_rng(0)
    for number in range(count):
        path = folder / f"class{number % CLASSES}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)).resize((side, side))
        noise = generator.integers(-12, 12, (side, side, 3))
        Image.fromarray((np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8)).save(path, quality=85)


def measure_apart(name: str, photos: Path, cache: Path | None, arguments: Any) -> dict[str, Any]:
    """One way, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (name, photos, cache, arguments.images, arguments.side, arguments.batches))


def measure(name: str, photos: Path, cache: Path | None, images: int, side: int, batches: int) -> dict[str, Any]:
    """What one way costs; CPU seconds, so that other processes on the machine do not count."""
    torch.set_num_threads(1)
    before = memory()
    data = FederatedDataModule(
        "image_folder", root=str(photos), image_size=side, num_clients=10, num_labels=50,
        cache_dir=None if cache is None else str(cache),
    )  # fmt: skip
    start = time.process_time()
    data.setup()
    setup = time.process_time() - start
    local = data.local_data(0, 1)
    indices = torch.randint(images, (batches, BATCH), generator=torch.Generator().manual_seed(0))
    local.weak(indices[0], "warm up")
    start, wall = time.process_time(), time.perf_counter()
    for number, batch in enumerate(indices):
        local.weak(batch, "measured", number)
    spent, elapsed = time.process_time() - start, time.perf_counter() - wall
    after = memory()
    return {
        "way": name,
        "images": images,
        "side": side,
        "set_up_cpu_s": round(setup, 2),
        "anonymous_MB": round(after["RssAnon"] - before["RssAnon"]),
        "of_files_MB": round(after["RssFile"] - before["RssFile"]),
        "views_per_cpu_s": round(batches * BATCH / spent),
        "views_per_wall_s": round(batches * BATCH / elapsed),
    }


def memory() -> dict[str, float]:
    """Resident memory of this process by kind, in MB (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) / 1000 for line in lines if line.startswith("Rss")}


if __name__ == "__main__":
    main()
