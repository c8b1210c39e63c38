from __future__ import annotations

import pytest

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
    rows = dict(listing.rows_of(kind))
    assert set(rows) >= NAMES[kind]
    assert all(rows.values())
    assert not {"Partition", "DataSource", "Availability"} & set(rows)
    assert main([kind]) == 0
    assert capsys.readouterr().out == listing.show(kind)
