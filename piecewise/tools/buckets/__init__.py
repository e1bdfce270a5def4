"""Plans, checks and shows bucket lists from recorded traffic.

In: token counts of requests or steps.
Out: a bucket file, tables and plots.
Read first: `plan.py`.
A wing: the story of a call can be read without this room.
"""
