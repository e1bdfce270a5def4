"""NumPy arrays and scalars that forward reads: served, and every change of them is seen."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import boundary_ops
import piecewise
from piecewise.errors.trace import NumpyValue
from piecewise.torch_backend import piecewise_backend

HIDDEN = 8


def _put(x, out):
    out.copy_(x.cumsum(0))


boundary_ops.define("numpy_state::put(Tensor x, Tensor(a!) out) -> ()", _put, token_args={"x": 0, "out": 0})

TABLE = np.arange(HIDDEN, dtype=np.float32)
SCALE = np.float32(4)


class Layer(nn.Module):
    """A linear, a boundary op, and `body` with the NumPy values that it may read."""

    def __init__(self, body):
        super().__init__()
        self.linear, self.body = nn.Linear(HIDDEN, HIDDEN), body
        self.floats = np.arange(HIDDEN, dtype=np.float32)
        self.places = np.array([0, 2, 1, 3, 4, 5, 6, 7])
        self.one = np.array(2.0, dtype=np.float32)
        self.float32, self.float64, self.int64 = np.float32(2.5), np.float64(1.5), np.int64(3)
        self.in_dict, self.in_list = {"a": np.float32(3)}, [np.arange(8.0)]

    def forward(self, x):
        x = self.linear(x)
        out = torch.empty_like(x)
        torch.ops.numpy_state.put(x, out)
        return self.body(self, out)


def make(body, num_layers=1, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(body) for _ in range(num_layers))).eval()
    graphed = piecewise.compile(model, buckets=[8, 16], progress=False, **settings)
    graphed.capture(torch.randn(5, HIDDEN))
    return graphed


def served(graphed, num_tokens=5):
    """How a call was served, once its result is eager's."""
    x, before = torch.randn(num_tokens, HIDDEN), graphed.stats.reasons.copy()
    with torch.no_grad():
        got, want = graphed(x), graphed.model(x)
    torch.testing.assert_close(got, want)
    return next(map(str, graphed.stats.reasons - before), "replay")


READERS = {
    "from_numpy": lambda m, x: x * torch.from_numpy(m.floats),
    "as_tensor": lambda m, x: x * torch.as_tensor(m.floats),
    "copied": lambda m, x: x * torch.from_numpy(m.floats.copy()),
    "in numpy": lambda m, x: x * torch.from_numpy(np.sin(m.floats) * 2 + 1),
    "index": lambda m, x: x[:, torch.from_numpy(m.places)],
    "an element": lambda m, x: x[:, : int(m.places[1])].sum(1),
    "0-dim": lambda m, x: x * torch.from_numpy(m.one),
    "in a list": lambda m, x: x * torch.from_numpy(m.in_list[0]).float(),
    "a global": lambda m, x: x * torch.from_numpy(TABLE),
    "float32": lambda m, x: x * m.float32,
    "float()": lambda m, x: x * float(m.float32),
    "float64": lambda m, x: x * m.float64,
    "int64": lambda m, x: x * m.int64,
    "a slice": lambda m, x: x[:, : m.int64].sum(1),
    "in a dict": lambda m, x: x * m.in_dict["a"],
    "a global scalar": lambda m, x: x * SCALE,
}


def change_in_place(layer):
    layer.floats[0], layer.places[1], layer.one[()], layer.in_list[0][0], TABLE[0] = 9.0, 7, 9.0, 9.0, 9.0


def replace_all(layer, monkeypatch):
    layer.floats, layer.places = layer.floats[::-1].copy(), layer.places[::-1].copy()
    layer.one = np.array(7.0, dtype=np.float32)
    layer.float32, layer.float64, layer.int64 = np.float32(7), np.float64(7), np.int64(5)
    layer.in_dict["a"], layer.in_list[0] = np.float32(7), np.full(8, 7.0)
    monkeypatch.setitem(globals(), "TABLE", np.full(HIDDEN, 7, np.float32))
    monkeypatch.setitem(globals(), "SCALE", np.float32(7))


@pytest.mark.parametrize("name", READERS)
def test_I4_a_numpy_value_is_served_and_its_changes_are_seen(name, monkeypatch):
    monkeypatch.setitem(globals(), "TABLE", TABLE.copy())
    graphed = make(READERS[name])
    layer = graphed.model[0]
    assert {served(graphed, size) for size in (1, 5, 8, 16)} == {"replay"}
    assert graphed.verify(torch.randn(5, HIDDEN)).ok
    change_in_place(layer)
    assert served(graphed) == "replay"
    replace_all(layer, monkeypatch)
    assert served(graphed) in ("moved_address", "module_state_changed")
    graphed.refresh()
    assert served(graphed) == "replay"


def test_I4_the_same_array_of_another_shape_is_another_one():
    graphed = make(lambda m, x: x * torch.from_numpy(m.floats).flatten()[:8])
    layer = graphed.model[0]
    layer.floats.shape = (2, 4)
    assert served(graphed) != "replay"
    layer.floats.shape = (8,)
    layer.floats = layer.floats[:]
    assert served(graphed) != "replay"


def test_I6_a_scalar_of_another_type_or_none_is_eager_s():
    graphed = make(READERS["float32"])
    for value in (np.float64(2.5), 2.5, torch.tensor(3.0)):
        graphed.model[0].float32 = value
        assert served(graphed) != "replay"
    del graphed.model[0].float32
    with pytest.raises(AttributeError):
        graphed(torch.randn(5, HIDDEN))


def test_layers_have_arrays_of_their_own():
    graphed = make(READERS["from_numpy"], num_layers=3)
    for at, layer in enumerate(graphed.model):
        layer.floats[:] = at + 1.0
        assert served(graphed) == "replay"
    graphed.model[1].floats = np.zeros(HIDDEN, np.float32)
    assert served(graphed) == "moved_address"


@pytest.mark.parametrize("how", ["item", "tensor"])
def test_I8_an_array_that_forward_writes_is_written_once_a_call(how):
    def body(m, x):
        if how == "item":
            m.floats[0] += 1
        else:
            torch.from_numpy(m.floats).add_(1.0)
        return x * torch.from_numpy(m.floats)

    graphed = make(body)
    layer = graphed.model[0]
    assert layer.floats.tolist() == list(range(HIDDEN)), "capture leaves no trace"
    other = copy.deepcopy(graphed.model)
    for _ in range(3):
        x = torch.randn(5, HIDDEN)
        with torch.no_grad():
            torch.testing.assert_close(graphed(x), other(x))
        np.testing.assert_array_equal(layer.floats, other[0].floats)
    assert graphed.stats.replays == 3


def test_weights_in_arrays_are_not_packed():
    """They would lie in other memory then, and what the array is written would be missed."""

    def body(m, x):
        return F.linear(x, torch.from_numpy(m.first)) + F.linear(x, torch.from_numpy(m.second))

    torch.manual_seed(0)
    model = Layer(body).eval()
    model.first, model.second = np.random.default_rng(0).random((2, HIDDEN, HIDDEN), np.float32)
    graphed = piecewise.compile(model, buckets=[8], progress=False, fusions=["pack_linears"])
    graphed.capture(torch.randn(5, HIDDEN))
    model.first[:] = 3.0
    assert served(graphed) == "replay"
    assert "pack_linears 0" in str(graphed.report())


def test_arrays_come_back_after_suspend():
    graphed = make(READERS["from_numpy"])
    graphed.suspend()
    graphed.model[0].floats = np.full(HIDDEN, 5, np.float32)
    graphed.resume()
    assert served(graphed) == "replay"


@pytest.mark.gpu
def test_numpy_values_of_a_model_on_cuda_are_eager_s():
    """A kernel takes a host value when it is launched, so what reads one runs between the graphs."""
    for body in (
        READERS["float32"],
        READERS["int64"],
        lambda m, x: x * torch.from_numpy(m.floats).to(x.device),
    ):
        torch.manual_seed(0)
        model = Layer(body).eval().cuda()
        graphed = piecewise.compile(model, buckets=[8], progress=False)
        graphed.capture(torch.randn(5, HIDDEN, device="cuda"))
        for value in (2.5, 7.0):
            model.float32, model.int64 = np.float32(value), np.int64(value)
            model.floats[0] = value
            x = torch.randn(5, HIDDEN, device="cuda")
            with torch.no_grad():
                torch.testing.assert_close(graphed(x), model(x))


def test_a_numpy_value_as_an_argument_is_an_error_that_says_what_to_pass():
    class Model(Layer):
        def forward(self, x, scale):
            return super().forward(x) * scale

    graphed = piecewise.compile(Model(lambda m, x: x).eval(), buckets=[8], progress=False)
    for value, shown in ((np.int64(3), r"3 \(int64\)"), (np.ones(HIDDEN, np.float32), r"1\. .*\(ndarray\)")):
        with pytest.raises(NumpyValue, match=rf"(?s)NumPy value.*{shown}.*Fix:.*int\(value\)"):
            graphed.capture(torch.randn(5, HIDDEN), value)
    graphed.capture(torch.randn(5, HIDDEN), 3)
    x = torch.randn(5, HIDDEN)
    with torch.no_grad():
        torch.testing.assert_close(graphed(x, np.int64(4)), graphed.model(x, np.int64(4)))
        torch.testing.assert_close(graphed(x, 4), graphed.model(x, 4))
    assert graphed.stats.replays == 1


def test_torch_compile_copies_them_in():
    torch._dynamo.reset()
    model = Layer(lambda m, x: x * torch.from_numpy(m.floats) * m.float32).eval()
    compiled = torch.compile(model, backend=piecewise_backend, options={"buckets": [8]}, dynamic=True)
    with torch.no_grad(), piecewise.capture_window():
        compiled(torch.randn(5, HIDDEN))
    changes = (
        lambda: None,
        lambda: model.floats.fill(3.0),
        lambda: setattr(model, "floats", np.ones(8, np.float32)),
        lambda: setattr(model, "float32", np.float32(7)),
    )
    for change in changes:
        change()
        x = torch.randn(6, HIDDEN)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
    assert piecewise.handle(compiled).stats.replays >= 4
