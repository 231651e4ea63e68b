"""One page for all reports: an HTML file, lines for a terminal, and JSON, made from the same parts."""
