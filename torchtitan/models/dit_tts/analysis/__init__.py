"""What makes runs fast: results of grids and training runs as tables, statistics, plots and one HTML page."""
