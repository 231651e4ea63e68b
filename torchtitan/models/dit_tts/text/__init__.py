"""Text on its way to the model: tokenizers and text encoders."""
