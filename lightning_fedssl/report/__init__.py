"""Pages that show a run, or a comparison of runs: one HTML file each, and nothing beside it."""
