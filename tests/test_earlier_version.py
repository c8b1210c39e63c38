"""Configurations and checkpoints that version 0.1.0 wrote keep working.

``golden/version_0.1.0.yaml`` is the ``config.yaml`` of a run of that version, ``version_0.1.0_round2.ckpt`` the
checkpoint of its second round, and ``version_0.1.0_round4.pt`` its weights and scalars after the fourth round, with the
PyTorch version and the CPU's vector instructions that computed them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedssl.cli.lightning_cli import FederatedCLI, quiet
from lightning_fedssl.storage import checkpoint_file

GOLDEN = Path(__file__).parent / "golden"
CONFIG, ROUND_2, ROUND_4 = (GOLDEN / f"version_0.1.0{end}" for end in (".yaml", "_round2.ckpt", "_round4.pt"))


def command(name: str, folder: Path) -> Any:
    with quiet():
        return FederatedCLI(
            [name, f"--config={CONFIG}", f"--ckpt_path={ROUND_2}", f"--trainer.default_root_dir={folder}"]
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PL_GLOBAL_SEED", "7")  # the command sets it; other tests must not see it
        yield command("fit", tmp_path_factory.mktemp("resumed"))


def test_a_run_of_the_earlier_version_resumes_to_the_same_weights_and_scalars(run: Any) -> None:
    """Bitwise where torch and the CPU are those that wrote the golden file, else up to rounding in 32 bits."""
    golden = torch.load(ROUND_4, weights_only=True)
    same_machine = (torch.__version__, torch.backends.cpu.get_cpu_capability()) == (golden["torch"], golden["cpu"])
    tolerance = 0.0 if same_machine else 1e-4
    found = run.model.server.model()
    assert found.keys() == golden["state_dict"].keys()
    for name, expected in golden["state_dict"].items():
        torch.testing.assert_close(found[name], expected, rtol=tolerance, atol=tolerance, msg=name)
    scalars = {name: float(run.trainer.callback_metrics[name]) for name in golden["metrics"]}
    assert scalars == pytest.approx(golden["metrics"], rel=tolerance, abs=tolerance)


def test_a_checkpoint_has_the_names_shapes_and_types_of_the_earlier_version(run: Any) -> None:
    """Later versions may add keys, but none may vanish or change its shape or type."""

    def layout(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: layout(inner) for key, inner in value.items()}
        return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value)

    now = checkpoint_file.load(Path(run.trainer.log_dir) / "checkpoints/last.ckpt")
    then = checkpoint_file.load(ROUND_2)
    assert now.keys() >= then.keys()
    for key in then.keys() - {"federation", "callbacks", "metrics"}:
        assert layout(now[key]) == layout(then[key]), key
    assert now["callbacks"].keys() >= then["callbacks"].keys()
    for key, state in then["callbacks"].items():
        assert now["callbacks"][key].keys() >= state.keys(), key
    assert now["federation"].keys() >= then["federation"].keys()
    for key in then["federation"].keys() - {"clients"}:  # other clients were drawn by the fourth round
        assert layout(now["federation"][key]) == layout(then["federation"][key]), key


def test_the_loaded_model_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    cli = command("test", tmp_path)
    saved = checkpoint_file.load(ROUND_2)
    for name, value in saved["state_dict"].items():
        assert torch.equal(cli.model.server.model()[name], value), name
    assert cli.trainer.round_index == 2
