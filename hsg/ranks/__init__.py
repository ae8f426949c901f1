"""Several processes that act as one.

distributed (gather, reduce, shard, save)   teams (which rank plays which rollouts)   stopping (signals)
"""
