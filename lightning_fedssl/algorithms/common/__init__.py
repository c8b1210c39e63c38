"""Base classes and functions that several methods share."""
