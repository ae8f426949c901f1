"""What is measured of training and of a policy.

metrics (of an iteration)   evaluation (fixed tasks)   measures, pass_at_k, intervals   speed (clocks, arithmetic)
"""
