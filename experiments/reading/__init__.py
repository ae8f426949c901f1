"""What a run folder says: curves, analysis, and whether it can be resumed.

Nothing here loads a model.
"""
