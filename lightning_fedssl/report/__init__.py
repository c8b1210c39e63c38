"""Pages that show a run, or a comparison of runs: one HTML file each, and nothing beside it."""

FILE_NAME = "report.html"
"""The page in the folder of a run or of a comparison."""
