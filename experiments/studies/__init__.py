"""Studies: a YAML file here is one table of cells and seeds; the modules run and tabulate it.

The command is experiments/study.py; results.py puts tables into docs/results.md.
"""
