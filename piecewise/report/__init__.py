"""Says what was captured, what was not, and why.

In: plans, verdicts, counts and memory.
Out: tables, JSON and Markdown.
Read first: `record.py`, what all reports share, then `report.py`.
A wing: the story of a call can be read without this room.
"""
