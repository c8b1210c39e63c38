"""Storage on disk: checkpoint files and client states."""
