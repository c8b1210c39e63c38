"""Data of your own: where the samples, the labels and the clients' identifiers come from.

A sample is an 8-bit image ``(channels, height, width)`` or numbers of any shape: a table's row
``(features,)``, a signal ``(channels, time)``, an image ``(channels, height, width)`` of floating
numbers. Numbers are held as float32.
"""
