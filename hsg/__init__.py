"""hsg: train language-model agents with strategies (StraTA and SGE) in plain PyTorch."""

__version__ = "0.1.0"
