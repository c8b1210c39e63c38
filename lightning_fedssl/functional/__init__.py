"""Pure functions of tensors and rounds: losses, pseudo-labels, averaging, statistics, schedules.

Independent of trainer and federation.
"""
