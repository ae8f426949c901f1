"""Measured against others and against ourselves: TRL on the same token ids, StraTA against our own GRPO.

Commands: make bench, make bench-overhead.
"""
