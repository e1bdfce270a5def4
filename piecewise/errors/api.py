"""Lists the refusals of `compile`, `enable` and `disable`, and of the `torch.compile` backend."""

from runners.errors import ConfigError, StateError


class NoModule(ConfigError):
    what, expected, got = "argument 'model'", "a torch.nn.Module", "{kind}"
    rule = "graphs read weights through their modules"
    fix = "wrap the function in an nn.Module"


class AlreadyEnabled(StateError):
    what = "{model} is enabled already"
    rule = "one GraphedModule per model in place"
    fix = "call piecewise.disable(model) first"


class NotEnabled(StateError):
    what = "{model} is not enabled"
    rule = "disable undoes enable"
    fix = "call it with the model that was passed to piecewise.enable"


class BackendArguments(ConfigError):
    """`torch.compile` passes something on that is no setting."""

    rule = "the backend is configured by options alone, which are fields of PiecewiseConfig by name"
    fix = 'torch.compile(model, backend="piecewise", options={{"buckets": [64, 128]}})'


class NoHandle(StateError):
    what = "no handle for {kind}"
    expected = 'the result of torch.compile(model, backend="piecewise"), after its first call'
    rule = "Dynamo calls the backend at the first call"
    fix = "call it once, then ask again"


class ExcludedByDynamo(StateError):
    what = "bucket {bucket}: Dynamo's guards exclude it"
    rule = "Dynamo alone decides when to trace again"
    fix = "use piecewise.compile, which traces such buckets at their own size"
