"""Storage: checkpoint files, files that are replaced in one step, client states, and names."""
