"""Generation with a trained run."""
