"""Reports about runs: the HTML page, charts, plots, terminal tables."""
