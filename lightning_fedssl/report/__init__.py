"""Pages that show a run, or a comparison of runs: one HTML file each, which needs no other."""

FILE_NAME = "report.html"
"""The page in the folder of a run or of a comparison."""
