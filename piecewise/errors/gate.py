"""Refusals of `piecewise regress`: what it cannot compare."""

from runners.errors import CaptureError, ConfigError


class WrongRecord(ConfigError):
    """A file is no benchmark record or baseline, or holds a wrong value."""

    what = "{where}"
    expected = "{wanted}"
    got = "{found}"
    rule = "records that are compared are whole, of this version's schema, with finite times above 0"
    fix = "measure again with `piecewise bench SPEC --out FILE`, or make the baseline anew with --update"


class AnotherCase(ConfigError):
    """The two records measured different models or settings."""

    what = "piecewise regress"
    expected = "two records of one spec and the same settings"
    got = "{differing}"
    rule = "a ratio says something only about the same model under the same settings"
    fix = "measure both alike, or accept the new ones with --update"


class NothingInCommon(ConfigError):
    """No quantity was measured in both records."""

    what = "piecewise regress"
    expected = "variants that both records measured"
    got = "{base} in the baseline, {current} now"
    rule = "a comparison that compares nothing cannot pass"
    fix = "measure with the baseline's --variants and --tokens"


class DirtyBaseline(ConfigError):
    """With --strict, the baseline is of a tree with uncommitted changes."""

    what = "the baseline {path}"
    expected = "a record of a committed tree"
    got = "one with uncommitted changes"
    rule = "with --strict a baseline can be measured again from its commit"
    fix = "commit, measure again, and write it with --update"


class WrongThreshold(ConfigError):
    """A threshold of the command line is no share of a known kind."""

    what = "--threshold {given}"
    expected = "KIND=SHARE with a share above 0, and a kind of {kinds}"
    rule = "a threshold belongs to one kind of quantity"
    fix = "for example --threshold over-floor=0.08"


class NoJsonschema(ConfigError):
    """The library that checks records is not installed."""

    what = "piecewise regress"
    expected = "jsonschema"
    got = "not installed"
    rule = "records are checked against their schema before they are compared"
    fix = "pip install 'piecewise-prefill[gate]'"


class NotGraphed(CaptureError, AssertionError):
    """`assert_graphed` found buckets without graphs, too few ops in graphs, or a replay that differs."""

    what = "assert_graphed({model})"
    got = "{problems}"
    rule = "every bucket has graphs, and every call in reach of one is replayed with eager's results"
    fix = "`print(graphed.report())` and `graphed.explain(...)` say why; lower min_coverage if it is meant so"
