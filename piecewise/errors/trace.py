"""Lists the refusals of a trace: what forward does, reads or is given that one graph cannot stand for."""

from runners.errors import TraceError


class CompileIsOff(TraceError):
    what, expected, got = "the model cannot be traced", "torch.compile in its default stance", "{mode}"
    rule = "the graph comes from one torch.compile trace"
    fix = "leave that mode around capture(), or run the model eagerly"


class BackwardHook(TraceError):
    what = "a full backward hook of {owner}"
    rule = "the graph comes from one torch.compile trace, and Dynamo traces no backward hooks"
    fix = (
        "register it after capture(): calls without gradients run no backward hooks, so the graphs stay "
        "right, and calls with gradients run the model itself"
    )


class NotOneGraph(TraceError):
    what = "forward cannot be traced: {cause}"
    rule = "forward must be one graph: no graph breaks"
    fix = "the cause names the construct; torch.compile(model, fullgraph=True) fails on the same line{hint}"


class NoOps(TraceError):
    what = "{model}.forward has no tensor operation to graph"
    rule = "a graph needs at least one op"
    fix = "pass the example that your model is called with"


class MissingArguments(TraceError):
    what, expected = "an example call without {missing}", "forward's arguments ({names})"
    rule = "the model is traced with the example, so each argument without a default is needed"
    fix = "pass to capture() what you pass to the model"


class InputNotPlain(TraceError):
    what, expected, got = "input '{name}'", "a plain strided tensor", "{kind}"
    rule = "graphs read static buffers, which are plain memory"
    fix = "convert it before the call, or keep it inside the model"


class InputRequiresGrad(TraceError):
    what = "input '{name}'"
    expected = "a tensor that does not require grad, as forward asks for that"
    got = "a {kind} with requires_grad={requires_grad}"
    rule = "a trace is used only for calls that it is valid for"
    fix = "pass a.detach(), or keep forward from asking"


class NumpyValue(TraceError):
    what = "forward reads a NumPy value that has no place in the model: {value}"
    expected = "torch tensors, and Python's own ints and floats, as arguments"
    rule = "what a call brings anew is copied in, or is part of its signature"
    fix = "pass int(value), float(value) or torch.from_numpy(array)"


class TensorWithoutPath(TraceError):
    what = "forward reads a tensor through {source}"
    expected = "an attribute, dict entry or list item reached from the model"
    rule = "a tensor that a graph reads needs a recorded path, so that a move is noticed"
    fix = "keep it as a parameter, buffer or plain attribute of a module"


class StateNotCompared(TraceError):
    what = "forward reads {path}"
    expected, got = "Python state that a call can compare", "a guard of Dynamo's of kind {kind}"
    rule = "a trace is used only for calls that it is valid for"
    fix = "keep what forward reads there as a plain attribute of the model"


class StoresState(TraceError):
    """forward changes Python state, or keeps a tensor that it has made."""

    what = "{model}.forward changes {paths}"
    rule = "a replay runs none of the model's Python, so what forward stores would be stale"
    fix = "keep it in a registered buffer and write that in place (self.count.add_(1)), or return it"


class OpaqueResult(TraceError):
    what, expected = "forward returns {value}", "tensors, numbers and containers of them"
    rule = "the result is rebuilt on each call; an object with state of its own would be stale"
    fix = "return its tensors, register it with torch.utils._pytree, or pass use_cache=False to transformers"


class ResultWithoutSource(TraceError):
    what = "forward returns a tensor that is neither computed, an input, nor a parameter or buffer"
    rule = "every output has a source that a replay can renew"
    fix = "register it as a buffer"


class ResultSubclass(TraceError):
    what = "forward returns a {name}"
    rule = "a result that is a tensor subclass has the size and strides of a tensor inside of it"
    fix = "return a plain tensor, such as its value dequantised"


class DistributedTensor(TraceError):
    what = "{where} is a {name}"
    rule = "collectives run between graphs, where the model calls them, and not inside of ops"
    fix = "graph the model of one rank, on its local tensors, with the collectives written out"


class SilentSubclass(TraceError):
    what = "{where} is a {name}"
    expected = "a plain tensor, or a subclass that names the tensors inside of it"
    got = "a class with __torch_dispatch__ and without __tensor_flatten__"
    rule = "graphs read the plain tensors inside of a subclass, at addresses that are compared"
    fix = "give {cls} __tensor_flatten__ and __tensor_unflatten__, or keep its value as a plain tensor"


class OwnTorchFunction(TraceError):
    what = "{where} is a {name}"
    got = "a class with a __torch_function__ of its own"
    rule = "a result is of the class that eager gives it, which a trace of such code does not tell"
    fix = (
        "derive {cls} from torch.nn.Parameter, give it __torch_dispatch__ and __tensor_flatten__, or keep "
        "its value as a plain tensor"
    )


class StateNotStrided(TraceError):
    what = "{where} is a {name} of layout {layout}"
    rule = "graphs read plain strided memory"
    fix = "keep its values and offsets as tensors of their own"


class SubclassOp(TraceError):
    """The ops below an op on a tensor subclass cannot be recorded."""

    what = "{node}, an op on a {names}, {problem}"
    rule = "graphs hold the ops below a tensor subclass, on the plain tensors that __tensor_flatten__ names"
    fix = "let __tensor_flatten__ name each tensor that the class reads, or keep that value as a plain tensor"
