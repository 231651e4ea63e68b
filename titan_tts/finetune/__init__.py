"""From an exported model and recordings to a model of their voice, and a comparison of both."""
