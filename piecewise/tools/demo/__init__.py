"""Shows graphed prefill on a real or a random model.

In: a model's name.
Out: what was captured, and a comparison with eager.
Read first: `demo.py`.
A wing: the story of a call can be read without this room.
"""
