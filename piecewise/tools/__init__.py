"""Runs the command line: demo, explain, verify, bench, buckets, config.

In: arguments of a command.
Out: printed reports, files and an exit code.
Read first: `cli.py`.
A wing: the story of a call can be read without this room.
"""
