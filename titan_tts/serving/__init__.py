"""A trained model as a web server, for programs and as a page."""
