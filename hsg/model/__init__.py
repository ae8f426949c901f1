"""The networks: how they are loaded, built, adapted, sharded and scored.

models (load, score)   policy (what a rollout needs)   nano (the small one)   lora   sharding
"""
