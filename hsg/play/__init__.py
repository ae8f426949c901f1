"""Episodes: environments in threads, one record a trajectory.

episode (one rollout)   pool (threads and time limits)   faults   curriculum (which tasks)   refill (dead groups)
"""
