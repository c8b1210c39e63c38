"""Pure tensor functions: losses, pseudo-labels, averaging, statistics; independent of trainer and federation."""
