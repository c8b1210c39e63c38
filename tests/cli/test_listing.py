from __future__ import annotations

import subprocess
import sys

import build_lists

from lightning_fedssl import algorithms
from lightning_fedssl.cli import listing
from lightning_fedssl.data.datasets import SPECS

NAMES = {
    "methods": {*algorithms.__all__},
    "configs": {"semifl_digits.yaml", "ablations/system.yaml"},
    "suites": {"digits.yaml", "cifar10_500.yaml"},
    "datasets": {*SPECS, "Arrays", "Signals", "SiteFolders"},
    "partitions": {"Dirichlet", "Iid", "Shards", "FromFile"},
    "availability": {"RandomDropout"},
}


def test_the_lists_are_those_of_the_package_and_need_no_torch() -> None:
    assert listing.FILE.read_text(encoding="utf-8") == build_lists.lists(), "python docs/build_lists.py"
    program = (
        f"import sys; from lightning_fedssl.cli import main; failed = any([*map(main, {[[kind] for kind in NAMES]})])"
    )
    program += "; sys.exit(failed or 'torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    for kind, names in NAMES.items():
        rows = listing.rows_of(kind)
        assert set(rows) >= names
        assert all(rows.values())
        assert not {"Partition", "DataSource", "Availability"} & set(rows)
        assert listing.show(kind) in shown
