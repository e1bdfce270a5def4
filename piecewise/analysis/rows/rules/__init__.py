"""Holds the rules, by what an op does with dims. Importing this package fills the table."""

from piecewise.analysis.rows.rules import bounds, lookups, pointwise, reductions, views

__all__ = ["bounds", "lookups", "pointwise", "reductions", "views"]
