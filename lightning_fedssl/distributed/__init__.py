"""Ranks: values that they exchange, and how many of them a machine's processor cores can run."""
