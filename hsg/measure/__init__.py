"""What is measured of training and of a policy.

metrics (of an iteration)   gap (sampler against update)   evaluation (fixed tasks)   measures, pass_at_k, intervals
speed (clocks, arithmetic)   progress (bars and lines)
"""
