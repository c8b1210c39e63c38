"""Batched augmentation: the weak and strong views of images."""
