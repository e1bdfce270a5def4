"""One module, several callers: threads, calls from inside a call, and calls that end in an exception."""

from __future__ import annotations

import threading

import pytest
import torch
from inspection import inspect
from state_models import Block, before_each_attend, graph, new_model, serve, tokens, what_was_counted


def test_I7_two_threads_get_their_own_results():
    model = new_model()
    graphed = graph(model)
    inputs = [[tokens(size, seed=100 * worker + size) for size in range(1, 17)] * 3 for worker in range(2)]
    with torch.no_grad():
        wanted = [[model(ids) for ids in part] for part in inputs]
    results, errors, start = [[], []], [], threading.Barrier(2)

    def work(worker):
        try:
            start.wait()
            with torch.no_grad():
                results[worker] = [graphed(ids) for ids in inputs[worker]]
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for got, want in zip(results, wanted, strict=True):
        for left, right in zip(got, want, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    assert graphed.stats.replays == 96


def test_I7_a_second_thread_waits_for_the_call_in_progress():
    model = new_model()
    graphed = graph(model)
    inside, may_go_on, finished = threading.Event(), threading.Event(), []

    def wait():
        if threading.current_thread().name == "slow":
            inside.set()
            assert may_go_on.wait(30)

    def call(ids):
        with torch.no_grad():
            finished.append((threading.current_thread().name, graphed(ids)))

    slow = threading.Thread(target=call, args=(tokens(5),), name="slow")
    fast = threading.Thread(target=call, args=(tokens(5, seed=1),), name="fast")
    with before_each_attend(wait):
        slow.start()
        assert inside.wait(30)
        fast.start()
        fast.join(0.2)
        assert fast.is_alive(), "static buffers are in use"
        may_go_on.set()
        slow.join()
        fast.join()
    assert [name for name, _ in finished] == ["slow", "fast"]
    with torch.no_grad():
        for (_, got), ids in zip(finished, (tokens(5), tokens(5, seed=1)), strict=True):
            torch.testing.assert_close(got, model(ids))


def test_I7_modes_of_one_thread_do_not_reach_another():
    graphed = graph(new_model())
    outcome = []

    def work():
        before = graphed.stats.snapshot()
        with torch.no_grad():
            graphed(tokens(5))
        outcome.append(what_was_counted(graphed, before))

    import piecewise

    with piecewise.eager_only():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert outcome == ["replay"]


def test_I7_a_call_from_inside_a_call_is_served_eagerly_and_both_are_right():
    model = new_model()
    graphed = graph(model)
    inner = []

    def call():
        if not inner:
            inner.append(None)
            inner.append(graphed(tokens(7, seed=3)))

    with torch.no_grad():
        want = model(tokens(5)), model(tokens(7, seed=3))
        with before_each_attend(call):
            got = graphed(tokens(5))
    torch.testing.assert_close(got, want[0])
    torch.testing.assert_close(inner[1], want[1])
    assert graphed.stats.reasons == {"reentrant_call": 1} and graphed.stats.replays == 1


class Stop(BaseException):
    """Like KeyboardInterrupt: not an Exception."""


@pytest.mark.parametrize("error", [ValueError("no blocks left"), Stop(), KeyboardInterrupt()], ids=repr)
def test_I7_an_exception_in_a_boundary_op_leaves_the_next_call_right(error):
    graphed = graph(new_model())

    def fail():
        raise error

    with torch.no_grad(), before_each_attend(fail), pytest.raises(type(error)):
        graphed(tokens(5))
    assert graphed.stats.replays == graphed.stats.eager_calls == 0, "no call was served"
    assert [serve(graphed, tokens(size)) for size in (5, 12, 3)] == ["replay"] * 3
    assert graphed.refresh().ok


@pytest.mark.parametrize("error", [ValueError("no blocks left"), Stop(), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_I7_an_exception_between_layers_leaves_the_next_call_right(error, at):
    """The caches of the layers before are written then, as eager's would be."""

    class Deep(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.second, self.third = new_model(), Block(), Block()

        def forward(self, ids):
            x = self.third(self.second(self.inner.block(self.inner.embedding(ids))))
            return self.inner.projection(x)

    torch.manual_seed(0)
    model = Deep().eval()
    graphed = graph(model)
    caches = [model.inner.block.cache, model.second.cache, model.third.cache]
    count = []

    def fail():
        count.append(None)
        if len(count) == at:
            raise error

    written = []
    for call in (model, graphed):
        for cache in caches:
            cache.zero_()
        count.clear()
        with torch.no_grad(), before_each_attend(fail), pytest.raises(type(error)):
            call(tokens(5))
        written.append([bool(cache.any()) for cache in caches])
    assert written[0] == written[1] == [layer + 1 < at for layer in range(3)]
    assert graphed.stats.replays == graphed.stats.eager_calls == 0
    assert [serve(graphed, tokens(size)) for size in (5, 12, 3)] == ["replay"] * 3


def test_I7_an_exception_in_an_eager_segment_leaves_the_next_call_right():
    fail = []

    def check(x):
        if fail:
            raise ValueError("not finite")
        return x[-1:].clone()

    library = torch.library.Library("state_threads", "DEF")
    library.define("check(Tensor x) -> Tensor")
    library.impl("check", check, "CPU")
    library.impl("check", lambda x: x.new_empty(1, x.shape[1]), "Meta")
    graphed = graph(new_model(after=lambda model, x: torch.ops.state_threads.check(x)))
    fail.append(True)
    with torch.no_grad(), pytest.raises(ValueError, match="not finite"):
        graphed(tokens(5))
    fail.clear()
    assert serve(graphed, tokens(5)) == "replay"


def test_I7_a_capture_in_one_thread_keeps_calls_of_another_waiting():
    model = new_model()
    graphed = graph(model)
    graphed.model.projection.weight = torch.nn.Parameter(model.projection.weight.detach() * 2)
    results = []

    def work():
        with torch.no_grad():
            results.append(graphed(tokens(5)))

    with inspect(graphed).exclusive("refresh"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(0.1)
        assert not results
    thread.join()
    with torch.no_grad():
        torch.testing.assert_close(results[0], model(tokens(5)))
