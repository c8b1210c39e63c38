"""The transport: Flower's message API (https://flower.ai), an optional dependency: ``pip install .[flower]``."""
