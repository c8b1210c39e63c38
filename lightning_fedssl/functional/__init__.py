"""Pure tensor functions: losses, pseudo-labels, averaging, statistics.

Independent of trainer and federation.
"""
