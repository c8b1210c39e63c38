"""What is written to disk and read again: checkpoint files and the clients' states."""
