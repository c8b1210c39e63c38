"""``lightning-fedssl compare``: trains many runs on identical partitions and initial weights and reports their results.

``suite`` describes the comparison that a user writes. ``plan`` derives the runs from it, and ``execute`` trains them.
``records`` reads their logged scalars, ``results`` computes the numbers, ``report`` and ``plots`` write tables and
plots.
"""
