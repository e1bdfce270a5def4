"""[I3] Of layers alike the probes run each op once; what can differ from layer to layer is run in each."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from toy_models import HIDDEN, Block, Toy, check_sizes, kinds, make_ids, reasons

import piecewise
from piecewise import probe_repeats
from piecewise.probe import Probe
from piecewise.probe_runs import NUM_POISONS


class _Calls(TorchFunctionMode):
    """Counts calls of some functions."""

    def __init__(self, *functions):
        super().__init__()
        self.functions, self.number = functions, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.number += func in self.functions
        return func(*args, **(kwargs or {}))


def _num_calls_in_probes(model, monkeypatch, *functions):
    """How often the probes of a capture call these functions, in all walks and runs."""
    calls, run = _Calls(*functions), Probe.run

    def counted(probe):
        with calls:
            return run(probe)

    monkeypatch.setattr(Probe, "run", counted)
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    graphed.capture(make_ids(5), torch.arange(5))
    return calls.number


class Layer(nn.Module):
    """A block and `twist(layer, x)`; buffers as given."""

    def __init__(self, twist, **buffers):
        super().__init__()
        self.block, self.twist = Block(), twist
        for name, value in buffers.items():
            self.register_buffer(name, torch.tensor(value))

    def forward(self, x, positions):
        return self.twist(self, self.block(x), positions)


class Deep(Toy):
    """A toy model with layers of the test's own."""

    def __init__(self, layers):
        super().__init__(num_blocks=0)
        self.layers = nn.ModuleList(layers)

    def forward(self, ids, positions=None):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, positions)
        return self.projection(x)


def _norms_and_activations(layer, x, positions):
    return torch.nn.functional.silu(x) + torch.nn.functional.layer_norm(x, (HIDDEN,))


def test_I3_ops_of_layers_alike_run_once(monkeypatch):
    counted = (torch.nn.functional.silu, torch.nn.functional.layer_norm)

    def number(num_layers):
        layers = [Layer(_norms_and_activations) for _ in range(num_layers)]
        return _num_calls_in_probes(Deep(layers).eval(), monkeypatch, *counted)

    few, many = number(3), number(9)
    assert few == many > 0


@torch.library.custom_op("test_probe_repeats::perhaps_flip", mutates_args=())
def perhaps_flip(x: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    return torch.where(sign < 0, x.flip(0), x)


@perhaps_flip.register_fake
def _(x, sign):
    return torch.empty_like(x)


def _by_integers(layer, x, positions):
    return x + x[positions * layer.sign]  # behind the end, and then from the end


def _by_rounded_floats(layer, x, positions):
    return x + x[positions * (layer.sign * 1.0).long()]


def _by_rounded_floats_of_a_table(layer, x, positions):
    places = torch.arange(x.shape[0])
    return x + layer.rows[places[positions * layer.sign.long()]]


def _by_comparison(layer, x, positions):
    return x + x[torch.where(layer.sign * 2 > 0, positions, -positions)]


def _by_another_kernel(layer, x, positions):
    return x + perhaps_flip(x, layer.sign)


def _by_another_kernel_further_on(layer, x, positions):
    return x + perhaps_flip(x, layer.sign * 2 + 0.0)


@pytest.mark.parametrize(
    "twist, one",
    [
        (_by_integers, 1),
        (_by_rounded_floats, 1.0),
        (_by_rounded_floats_of_a_table, 1.0),
        (_by_comparison, 1.0),
        (_by_another_kernel, 1.0),
        (_by_another_kernel_further_on, 1.0),
    ],
)
def test_I3_what_decides_on_rows_is_looked_at_in_each_layer(twist, one):
    rows = torch.randn(64, HIDDEN).tolist()
    graphed = check_sizes(Deep([Layer(twist, sign=one * by, rows=rows) for by in (1, 1, -1, 1)]).eval())
    assert reasons(graphed) == {"mixes_tokens": 1}
    assert kinds(graphed) == "gb" * 3 + "geg" + "bg"


def _by_coordinates(layer, x, positions):
    rows = torch.stack([torch.zeros_like(x), x * 0 + layer.sign], -1)  # -1: the first row, 1: the last
    sampled = torch.nn.functional.grid_sample(x[None, None], rows[None], align_corners=True)
    return x + sampled[0, 0]


def test_I3_coordinates_are_looked_at_in_each_layer():
    layers = [Layer(_by_coordinates, sign=sign) for sign in (-1.0, -1.0, 0.0)]
    graphed = check_sizes(Deep(layers).eval(), sizes=(2, 5, 8, 9, 16))
    assert reasons(graphed) == {"mixes_tokens": 1}


def _nan_in_the_first(layer, x, positions):
    rows = torch.ones_like(x) * layer.scale
    rows = rows / (rows * rows).sum(-1, keepdim=True).sqrt()
    return x + ((rows @ rows.T) @ rows) ** layer.power  # to the power of 0 even NaN is 1


def test_I3_real_rows_of_nan_prove_nothing():
    layers = [Layer(_nan_in_the_first, scale=s, power=p) for s, p in ((0.0, 0.0), (1.0, 1.0), (2.0, 1.0))]
    assert reasons(check_sizes(Deep(layers).eval()))["mixes_tokens"] >= 2


_library = torch.library.Library("test_probe_repeats", "FRAGMENT")
_library.define("choose(Tensor x, Tensor sign) -> Tensor")
_library.impl("choose", lambda x, sign: torch.where(sign < 0, x.flip(0), x), "CompositeImplicitAutograd")


@torch.compiler.allow_in_graph
def choose(x, sign):
    return torch.where(sign < 0, x.flip(0), x)


def _by_a_composite(layer, x, positions):
    return x + torch.ops.test_probe_repeats.choose(torch.ones_like(x).cumsum(0), layer.sign)


def _by_a_function_in_the_graph(layer, x, positions):
    return x + choose(torch.ones_like(x).cumsum(0), layer.sign)


@pytest.mark.parametrize("twist", [_by_a_composite, _by_a_function_in_the_graph])
def test_I3_what_torchs_ops_are_put_together_to_is_looked_at_in_each_layer(twist):
    graphed = check_sizes(Deep([Layer(twist, sign=sign) for sign in (1.0, 1.0, -1.0)]).eval())
    assert reasons(graphed) == {"mixes_tokens": 1}


def _by_pivots(layer, x, positions):
    column = torch.ones_like(x)[:, :1].cumsum(0)
    _, lower, _ = torch.linalg.lu(column**layer.power * layer.scale)
    return x + lower


def test_I3_pivots_are_chosen_in_each_layer():
    layers = [Layer(_by_pivots, power=p, scale=s) for p, s in ((-1.0, 1e6), (-1.0, 1e6), (1.0, 1.0))]
    assert reasons(check_sizes(Deep(layers).eval())) == {"mixes_tokens": 1}


def _draws_where_told(layer, x, positions):
    chance = x.sigmoid() * layer.scale
    return x + (torch.bernoulli(chance) if layer.draws else chance)


def test_I3_an_op_that_checks_its_values_gets_those_of_its_layer():
    layers = [Layer(_draws_where_told, scale=scale) for scale in (2.5, 0.9, 0.3)]
    for layer, draws in zip(layers, (False, True, True), strict=True):
        layer.draws = draws
    assert reasons(check_sizes(Deep(layers).eval())) == {"random": 2}


def _from_a_table_of_its_own(layer, x, positions):
    return x + layer.rows[(x.sigmoid().mean(-1) * layer.rows.shape[0]).long()]


def test_I3_a_layers_indices_are_not_those_of_another():
    layers = [Layer(_from_a_table_of_its_own, rows=torch.randn(n, HIDDEN).tolist()) for n in (64, 4)]
    check_sizes(Deep(layers).eval())


def _mixed_in_place(layer, x, positions):
    y = x * 2
    y[-1] = 0
    return (y + 1).tanh()


def test_I3_memory_that_is_written_is_each_layers_own():
    graphed = check_sizes(Deep([Layer(_mixed_in_place) for _ in range(3)]).eval())
    assert set(reasons(graphed)) == {"mixes_tokens"}
    assert kinds(graphed) == "g" + "bgeg" * 3


def test_I3_an_op_that_mixes_is_eager_in_each_layer():
    graphed = check_sizes(Deep([Layer(lambda layer, x, _: x + x.flip(0)) for _ in range(4)]).eval())
    assert reasons(graphed) == {"mixes_tokens": 4}


def _cast(layer, x, positions):
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(layer.casts)):
        y = torch.nn.functional.linear(x, layer.block.o.weight)
    if layer.casts:
        y = y @ layer.narrow  # of the same type, or an error
    return x + y.to(x.dtype)


def test_I3_regions_of_autocast_tell_layers_apart():
    layers = [Layer(_cast) for _ in range(4)]
    for index, layer in enumerate(layers):
        layer.casts = index % 2
        layer.register_buffer("narrow", torch.eye(HIDDEN, dtype=torch.bfloat16))
    check_sizes(Deep(layers).eval())


def test_I3_nodes_that_take_too_much_memory_to_keep_are_run_each_time(monkeypatch):
    layers = [Layer(_norms_and_activations) for _ in range(4)]

    def number():
        with monkeypatch.context() as patched:
            return _num_calls_in_probes(Deep(layers).eval(), patched, torch.nn.functional.silu)

    kept = number()
    monkeypatch.setattr(probe_repeats, "MAX_BYTES", 0)
    assert number() - kept == 3 * (1 + NUM_POISONS)


def test_I3_a_walk_that_fails_on_values_of_another_layer_is_made_without(monkeypatch):
    def failing(*_):
        raise RuntimeError("no value that this op takes")

    layers = [Layer(_norms_and_activations) for _ in range(4)]
    expected = _num_calls_in_probes(Deep(layers[:1]).eval(), monkeypatch, torch.nn.functional.silu)
    monkeypatch.setattr(Probe, "_stand_in", failing)
    found = _num_calls_in_probes(Deep(layers).eval(), monkeypatch, torch.nn.functional.silu)
    assert found > 4 * (expected - 1)
    check_sizes(Deep(layers).eval())
