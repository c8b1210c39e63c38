"""Communication between ranks, and how many ranks a CPU is given."""
