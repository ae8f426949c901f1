"""The parts of `hsg evaluate`: the model that is asked for, its samples, and comparisons.

Samples are kept as they come, so that a stopped evaluation goes on.
"""
