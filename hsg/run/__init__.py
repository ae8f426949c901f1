"""A run on disk, and what it is made of.

build (policy, judge, tasks)   tracking (the run folder)   origin, records, checkpoint   console   files, locks, taskfile
"""
