"""Partitions: which client and which server hold which training images and labels."""
