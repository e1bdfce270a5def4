"""Compares benchmark records with a baseline, so that a pipeline fails when graphs regress.

In: records that `piecewise bench --out` wrote.
Out: findings as text, Markdown, JUnit XML, JSON and a plot; an exit code.
Read first: `compare.py`.
A wing: the story of a call can be read without this room.
"""
