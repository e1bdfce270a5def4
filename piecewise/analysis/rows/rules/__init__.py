"""Holds the rules, by what an op does with dims. Importing this package fills the table."""

from piecewise.analysis.rows.rules import arithmetic, bounds, lookups, views

__all__ = ["arithmetic", "bounds", "lookups", "views"]
