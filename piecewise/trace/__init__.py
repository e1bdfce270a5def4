"""Traces a model and one example call into a graph.

In: a model and an example call.
Out: a `Trace`: the graph, the symbols, and the state that the graph holds for.
Read first: `trace.py`, then `dynamo/run.py`.
"""
