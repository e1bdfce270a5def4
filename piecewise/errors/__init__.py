"""Lists every refusal of `piecewise`: a class for each, with its rule and its fix.

In: nothing of the package; the roots of the errors come from `runners.errors`.
Out: a module for each room, such as `errors/settings.py`; docs/ERRORS.md is made of them.
Read first: `PiecewiseError` in `runners/errors.py`.

    class UnknownSetting(ConfigError):
        what, expected, got = "setting {name!r}", "a field of PiecewiseConfig", "an unknown name"
        rule = "a setting is a field of PiecewiseConfig"
        fix = "did you mean {nearest!r}? The settings are {names}"

    raise UnknownSetting(name=name, nearest=nearest, names=names)     # where it is found

`what`, `expected`, `got`, `rule` and `fix` are templates; a text given to the constructor wins over its own.
A class has a docstring only where these do not tell when it is raised.
"""
