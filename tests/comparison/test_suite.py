from __future__ import annotations

from typing import Any

import pytest

from lightning_fedssl.comparison.suite import Suite, SuiteEntry, SuiteGroup


def suite_of(overrides: dict[str, Any] | None = None, labels: tuple[str, ...] = ("A", "B"), **keys: Any) -> Suite:
    entries = [SuiteEntry(label, "a.yaml", overrides=overrides or {}) for label in labels]
    return Suite("T", [SuiteGroup("G", entries)], **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"seeds": []}, r"seeds: \[\]: give at least one whole number"),
        ({"seeds": [-1]}, r"seeds: \[-1\]: give at least one whole number from 0"),
        ({"seeds": [1, 1]}, "seeds: 1 is there twice"),
        ({"labels": ("A", "A")}, "labels: 'A' is there twice"),
        ({"target": -1}, "target: -1: give a number above 0"),
        ({"overrides": {"trainer": {"default_root_dir": "x"}}}, "trainer.default_root_dir .* give --output"),
    ],
)
def test_what_is_wrong_with_a_suite_is_named(keys: dict[str, Any], message: str) -> None:
    suite_of({"trainer": {"max_rounds": 3}, "data.num_clients": 2}, seeds=[0, 1], target=1.0)
    with pytest.raises(ValueError, match=message):
        suite_of(**keys)


def test_two_groups_need_two_titles() -> None:
    with pytest.raises(ValueError, match="titles: 'G' is there twice"):
        Suite("T", [SuiteGroup("G", [SuiteEntry(label, "a.yaml")]) for label in "AB"])
    assert SuiteEntry("A", ["a.yaml", "b.yaml"]).files == ["a.yaml", "b.yaml"]
