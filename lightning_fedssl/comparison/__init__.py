"""``lightning-fedssl compare``: trains many runs on identical partitions and initial weights and
reports their results.

``suite`` describes the comparison that a user writes. ``plan`` derives the runs from it, and
``execute`` trains them. ``results`` reads their logged scalars, ``report`` and ``page`` write
tables and a page, and ``verdicts`` says what a difference between methods allows to say.
"""
