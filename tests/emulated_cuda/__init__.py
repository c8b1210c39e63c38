"""An emulated CUDA device: code for a GPU runs, with the numbers of a CPU, on a machine without one.

Tensors report that they are on ``cuda:0`` and compute on the CPU. The rules that are enforced: tensors of an operation
are on one device (numbers without dimensions may come from the CPU), and an asynchronous download holds garbage until
the host has waited. It runs in a process of its own, in which a small library (``driver.c``) answers for the driver.
"""
