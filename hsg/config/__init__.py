"""Every option of a run, and how a file or a command sets it.

    options (the dataclasses)   algorithms (bundles of methods)   loading (YAML, --set)   arguments   checks
No torch here: a typo is refused before anything heavy is imported.
"""
