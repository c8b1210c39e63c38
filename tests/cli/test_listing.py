from __future__ import annotations

import subprocess
import sys

import pytest

from docs import build_stubs
from lightning_fedssl import algorithms
from lightning_fedssl.cli import listing, main
from lightning_fedssl.data.datasets import SPECS

NAMES = {
    "methods": set(algorithms.__all__),
    "configs": {"semifl_digits.yaml", "ablations/system.yaml"},
    "suites": {"digits.yaml", "cifar10_500.yaml"},
    "datasets": {*SPECS, "Arrays", "Signals", "SiteFolders"},
    "partitions": {"Dirichlet", "Iid", "Shards", "FromFile"},
    "availability": {"RandomDropout"},
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_listing_names_what_can_be_given_with_a_line_about_each(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([kind]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[:-2])
    assert set(rows) >= NAMES[kind]
    assert all(rows.values())
    assert not {"Partition", "DataSource", "Availability"} & set(rows)


def test_the_lists_are_those_of_the_package_and_need_no_torch() -> None:
    assert listing.FILE.read_text(encoding="utf-8") == build_stubs.lists(), "python docs/build_stubs.py"
    program = f"import sys; from lightning_fedssl.cli import main; [*map(main, {[[kind] for kind in NAMES]})]"
    program += "; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
