"""What learns or waits beside the policy.

companions (critic of PPO, novelty of RND)   underway (an update that was stopped half-way)
"""
