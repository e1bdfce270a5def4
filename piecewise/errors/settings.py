"""Lists the refusals of settings, and of the files that hold them."""

from runners.errors import ConfigError


class WrongSettings(ConfigError):
    """Some settings have an unknown name, or a value that this version cannot honour; all are listed."""

    rule = "every setting has a known name and a value of its type that this version can honour"
    fix = "correct the value or leave the setting out for its default"


class UnreadableSettingsFile(ConfigError):
    what, expected, got = "settings file {path}", "a readable TOML file", "{problem}"
    rule = "settings come from a UTF-8 TOML file of at most {limit} KiB"
    fix = "correct the file; PiecewiseConfig(...).to_toml(path) writes a valid one"
