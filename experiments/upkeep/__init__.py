"""What keeps the repository true: pages made from code, notebooks that run, environments that keep the protocol.

Commands: make docs, make notebooks, hsg check-env.
"""
