"""A trained run as a folder of its own, to be used, published and fine-tuned without the run and its data."""
