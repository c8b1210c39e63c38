"""Pure tensor functions: losses, pseudo-labels, mixup, averaging, statistics. Nothing here knows a federation."""
