"""Lists the refusals of `compile`, `enable` and `disable`, and of the `torch.compile` backend."""

from runners.errors import ConfigError, StateError, TraceError


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

    rule = "the backend is configured by options alone: fields of PiecewiseConfig, and 'config', a TOML path"
    fix = (
        'torch.compile(model, backend="piecewise", options={{"buckets": [64, 128]}}), or'
        ' options={{"config": "settings.toml"}}'
    )


class NoHandle(StateError):
    what = "no handle for {kind}"
    expected = 'the result of torch.compile(model, backend="piecewise"), kept alive'
    rule = "a handle holds no model, and torch._dynamo.reset() ends what was compiled before it"
    fix = 'compiled = torch.compile(model, backend="piecewise"); piecewise.handle(compiled)'


class BreaksApart(TraceError):
    what, expected = "a model that Dynamo cuts at graph breaks", "one Dynamo graph with all of forward"
    rule = "capture, explain and verify look at one graph; calls replay in each part with boundary ops"
    fix = (
        "torch.compile(..., fullgraph=True) names the line that breaks; or call the compiled model inside"
        " piecewise.capture_window(), which captures each part"
    )


class ExcludedByDynamo(StateError):
    what = "bucket {bucket}: Dynamo's guards exclude it"
    rule = "Dynamo alone decides when to trace again"
    fix = "use piecewise.compile, which traces such buckets at their own size"
