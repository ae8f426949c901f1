"""Strategies: proposed, selected, judged, learned from.

propose (candidates)   selector (farthest points)   judge (which turns were wasted)   reflection (earlier attempts)
"""
