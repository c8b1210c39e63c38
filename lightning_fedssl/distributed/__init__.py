"""Communication between ranks, and the number of ranks on a CPU."""
