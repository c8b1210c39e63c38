"""Pure tensor functions: losses, pseudo-labels, mixup, averaging, statistics; independent of trainer and federation."""
