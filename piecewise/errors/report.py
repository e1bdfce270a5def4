"""Lists the refusals of plans and captures with too few graphs."""

from runners.errors import CaptureError


class CoverageError(CaptureError):
    """Fewer of the model's ops are in graphs than `min_coverage` asks for."""


class LowPlanCoverage(CoverageError):
    what = "coverage of the plan{ops}"
    expected = "at least {minimum:.1%} of ops in graphs (min_coverage)"
    got = "{coverage:.1%}; {num_eager} ops run eagerly"
    rule = "a model that silently runs outside of graphs is slow for no visible reason"
    fix = (
        "rewrite the ops listed here so that each row depends on its own row alone, make one of them a"
        " boundary op, or lower min_coverage"
    )


class LowBucketCoverage(CoverageError):
    what = "coverage of the captured buckets{buckets}"
    expected = "at least {minimum:.1%} of ops in graphs (min_coverage) in each of {num_buckets} buckets"
    got = "less in {num_low}; nothing of this capture was kept"
    rule = "a bucket that silently runs eagerly is slow for no visible reason"
    fix = "remove the cause named for the bucket, leave the bucket out, or lower min_coverage"


class NothingCaptured(CaptureError):
    what, expected, got = "capture(){reasons}", "graphs for at least one bucket", "none"
    rule = "a model that silently runs without graphs is slow for no visible reason"
    fix = "do what the reasons above say, or set allow_eager=True to have every call run eagerly"
