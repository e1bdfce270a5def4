"""Measures graphed calls beside eager and compiled ones.

In: a prefill case.
Out: times, ratios and memory as a table and as JSON.
Read first: `latency.py`.
A wing: the story of a call can be read without this room.
"""
