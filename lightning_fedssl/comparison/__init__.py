"""``lightning-fedssl compare``: many runs on identical partitions and initial weights, and what they come to.

``suite`` is what a user writes, ``plan`` makes runs of it, ``execute`` brings them to their end, ``records`` reads
what they logged, ``results`` computes the numbers, ``report`` and ``plots`` show them.
"""
