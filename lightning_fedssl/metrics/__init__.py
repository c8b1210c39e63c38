"""Scalars: of a round, and of an evaluation."""
