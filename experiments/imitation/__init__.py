"""The warm start: demonstrations, supervised training on them, and a report of what was learned.

The command is experiments/warmstart.py.
"""
