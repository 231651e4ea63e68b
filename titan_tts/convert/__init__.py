"""Weights of other projects to exported folders, and back."""
