"""Storage: checkpoint files, files that are replaced in one step, and client states."""
