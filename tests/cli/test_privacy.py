"""The command privacy: what every method sends, what is refused, and the price of epsilon."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install .[privacy]")

from lightning_fedssl.cli import main

PRIVATE = [
    "--trainer.quarantine", "null", "--trainer.privacy.delta", "1e-2", "--trainer.privacy.epsilon", "8",
    "--trainer.callbacks", "[{class_path: StaticBatchNorm, init_args: {source: server}}]",
]  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    capsys.readouterr()
    assert main(["privacy", *options]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("config", "sent", "covered"),
    [
        ("semifl", ["376,744 bytes  weights", "NOT covered       a few numbers  count, mean and variance"], True),
        ("fedavg", ["NOT covered       a few numbers  number of images"], True),
        ("fedshvr", ["NOT covered             8 bytes  tau"], False),
        ("semisfl", ["features of every image, at every step"], False),
        ("fl2", ["NOT covered"], False),
        ("easgd", ["376,744 bytes  optimizer state"], False),
        ("fedrgd", ["376,744 bytes  optimizer state"], False),
        ("rscfed", ["is_labeled", "Refused with trainer.privacy: trainer.quarantine"], False),
    ],
)
def test_what_a_method_sends(config: str, sent: list[str], covered: bool, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--config", f"{config}_digits.yaml")
    assert all(line in text for line in sent)
    assert covered or "set it to uniform" not in text
    assert ("only sums: yes" in text) is covered is ("covered " in text.replace("NOT covered", ""))
    assert not list(Path().iterdir())


def test_a_private_configuration_has_nothing_that_is_refused_and_its_price(capsys: pytest.CaptureFixture[str]) -> None:
    public, text = (
        printed(capsys, "--config", "semifl_digits.yaml"),
        printed(capsys, "--config", "semifl_digits.yaml", *PRIVATE),
    )
    assert public.count("Refused") == 2
    assert "Refused" not in text
    assert "Privacy: epsilon 8 at delta 0.01 for one client" in text
    assert "The noise hides any update" in text
