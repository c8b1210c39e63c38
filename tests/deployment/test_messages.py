from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install .[flower]")

from flwr.app import Array, Error, Message
from flwr.supercore.task_identity import TaskIdentity

from lightning_fedssl.deployment.messages import MessageError, printable, read_answer, read_order, to_records
from tests.toy import assert_same

from .helpers import records, through_bytes

EXPECTED = {"w": torch.zeros(2)}


def message(content: Any) -> Message:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    return through_bytes(Message(content, dst_node_id=1, message_type="train.client"))


def test_tensors_values_and_scalars_survive_flower_s_bytes() -> None:
    tensors = {
        "w": torch.randn(3, 2), "d": torch.randn(4, dtype=torch.float64), "n": torch.tensor(7), "e": torch.zeros(0, 3),
        "b": torch.tensor([True, False]), "h": torch.ones(2).half(), "t": torch.randn(4, 3).t(),
    }  # fmt: skip
    values = {"round": 3, "result": ["w"], "holds_weights": True}
    sent = message(to_records(tensors, values, {"client/loss": (1.5, 2.0), "other": (1.0, 1.0)}))
    numbers, found, scalars = read_answer(sent, ["round"], tensors, scalars=["client/loss"])
    assert_same(found, tensors)
    assert (numbers, scalars) == ([3], {"client/loss": (1.5, 2.0)})
    found, order = read_order(sent.content)
    assert_same(found, tensors)
    assert order == values


def saved(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def header(text: str, version: bytes = b"\x01\x00", data: bytes = b"\0" * 8) -> bytes:
    """A ``.npy`` file with a header of this text."""
    line = text.encode() + b"\n"
    return b"\x93NUMPY" + version + len(line).to_bytes(2, "little") + line + data


def described(shape: str, kind: str = "'<f4'", order: str = "False") -> bytes:
    return header(f"{{'descr': {kind}, 'fortran_order': {order}, 'shape': {shape}, }}")


def zipped() -> bytes:
    file = io.BytesIO()
    np.savez(file, w=np.zeros(2))
    return file.getvalue()


def pickled() -> bytes:
    return saved(np.array([{"a": 1}, None], dtype=object), allow_pickle=True)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "garbage": lambda: b"garbage",
    "huge shape": lambda: described("(1000000000000000,)"),
    "negative shape": lambda: described("(-1,)"),
    "huge type": lambda: described("(2,)", "'V2000000000'"),
    "nested minus": lambda: described(f"({'-' * 9000}1,)"),
    "version 9": lambda: header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", b"\x09\x00"),
    "zip of arrays": zipped,
    "big-endian": lambda: saved(np.zeros(2, dtype=">f4")),
    "column order": lambda: described("(2,)", order="True"),
    "pickle": pickled,
    "objects": lambda: described("(2,)", "'|O'"),
    "other type": lambda: saved(np.zeros(2)),
    "too short": lambda: saved(np.zeros(2, dtype=np.float32))[:-1],
    "too long": lambda: saved(np.zeros(2, dtype=np.float32)) + b"\0",
    "10 MB": lambda: saved(np.zeros(2, dtype=np.float32)) + b" " * 10**7,
    "padded header": lambda: header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }" + " " * 60000),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_bytes_that_are_no_tensor_of_the_expected_shape_and_type_are_not_parsed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("foreign bytes reach a parser")

    data = HOSTILE[kind]()
    answer = message(records({"w": Array("float32", (2,), "numpy.ndarray", data)}, {"round": 1}))
    monkeypatch.setattr(np, "load", parse)
    monkeypatch.setattr(np.lib.format, "read_array", parse)
    with pytest.raises(MessageError, match=r"^'w' of its tensors is float32 \(2,\) in \d+ bytes instead of"):
        read_answer(answer, ["round"], EXPECTED)


FLOATS = saved(np.zeros(2, dtype=np.float32))
RIGHT = np.zeros(2, dtype=np.float32)


@pytest.mark.parametrize(
    ("array", "values", "reason"),
    [
        (Array("float64", (2,), "numpy.ndarray", FLOATS), {"round": 1}, r"is float64 \(2,\)"),
        (Array("float32", (3,), "numpy.ndarray", FLOATS), {"round": 1}, r"is float32 \(3,\)"),
        (Array("\n\x1b", (2,), "numpy.ndarray", b""), {"round": 1}, r"is \\n\\x1b \(2,\)"),
        (RIGHT, {}, "its value 'round' is None"),
        (RIGHT, {"round": -1}, "is -1"),
        (RIGHT, {"round": 2**53 + 1}, "is 9007199254740993"),
        (RIGHT, {"round": 1.0}, r"is 1\.0"),
        (RIGHT, {"round": True}, "is True"),
        (RIGHT, {"round": [1, 2]}, r"is \[1, 2\]"),
    ],
)
def test_claims_about_an_array_and_values_that_are_no_whole_numbers_are_refused(
    array: Any, values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(MessageError, match=reason):
        read_answer(message(records({"w": array}, values)), ["round"], EXPECTED)


@pytest.mark.parametrize("pair", [[1.0], [float("nan"), 1.0], [1.0, 0.0], [1.0, float("inf")], [1.0, -1.0]])
def test_scalars_that_are_no_sum_and_weight_are_refused(pair: list[float]) -> None:
    answer = message(records({"w": RIGHT}, {"round": 1}, {"client/loss": pair}))
    with pytest.raises(MessageError):
        read_answer(answer, ["round"], EXPECTED, scalars=["client/loss"])
    assert read_answer(answer, ["round"], EXPECTED)[2] == {}


def test_tensors_are_in_the_server_s_order() -> None:
    """Rules such as Median join those of an update: a node that turned them round would spoil the model."""
    answer = message(records({"w": RIGHT, "a": RIGHT}, {}))
    assert [*read_answer(answer, [], {"a": EXPECTED["w"], "w": EXPECTED["w"]})[1]] == ["a", "w"]


@pytest.mark.parametrize("missing", ["tensors", "values"])
def test_an_answer_without_a_record_is_refused(missing: str) -> None:
    content = records({}, {"round": 1})
    del content[missing]
    with pytest.raises(MessageError, match=r"cannot be read \(KeyError\)"):
        read_answer(message(content), ["round"], EXPECTED)


def test_the_refusal_of_a_failed_answer_has_the_node_s_reason() -> None:
    answer = Message(Error(code=1, reason="disk full"), reply_to=message(records({}, {})))
    with pytest.raises(MessageError, match="disk full"):
        read_answer(answer, ["round"], EXPECTED)


def test_texts_of_others_are_cut_and_escaped() -> None:
    assert printable("a\nb\x1b[31m") == "a\\nb\\x1b[31m"
    assert len(printable("é" * 10**6)) == 200
    assert re.fullmatch(r"[ -~]*", printable("".join(map(chr, range(500)))))
    assert zipfile.is_zipfile(io.BytesIO(zipped()))
