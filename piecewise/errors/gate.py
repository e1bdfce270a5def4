"""Refusals of `piecewise regress`: what it cannot compare."""

from runners.errors import CaptureError, ConfigError


class WrongRecord(ConfigError):
    what, expected, got = "{where}", "{wanted}", "{found}"
    rule = "records that are compared are whole, of this version's schema, with finite times above 0"
    fix = "measure with `piecewise bench SPEC --out FILE`; remove a wrong baseline and make it with --update"


class AnotherCase(ConfigError):
    what, expected, got = "piecewise regress", "two records of one spec and the same settings", "{differing}"
    rule = "a ratio says something only about the same model under the same settings"
    fix = "measure both alike, with the same --tokens and --variants, or accept the new record with --update"


class DirtyBaseline(ConfigError):
    what = "the baseline {path}"
    expected, got = "a record of a committed tree", "one with uncommitted changes"
    rule = "with --strict a baseline can be measured again from its commit"
    fix = "commit, measure again, and write it with --update"


class WrongThreshold(ConfigError):
    what, expected = "--threshold {given}", "KIND=SHARE with a share above 0, and a kind of {kinds}"
    rule = "a threshold belongs to one kind of quantity"
    fix = "for example --threshold over-floor=0.08"


class NoJsonschema(ConfigError):
    what, expected, got = "piecewise regress", "jsonschema", "not installed"
    rule = "records are checked against their schema before they are compared"
    fix = "pip install 'piecewise-prefill[gate]'"


class NotGraphed(CaptureError, AssertionError):
    what = "assert_graphed({model})"
    got = "{problems}"
    rule = "every bucket has graphs, and every call in reach of one is replayed with eager's results"
    fix = "`print(graphed.report())` and `graphed.explain(...)` say why; lower min_coverage if it is meant so"
