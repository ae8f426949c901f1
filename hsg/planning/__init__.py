"""Memory and time of a configuration before anything is loaded.

plan (the command)   footprint (bytes and work by purpose)   architecture, sizes, counted (numbers of a model)
"""
