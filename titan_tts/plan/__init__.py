"""Memory, time and MFU of a run, computed before it starts.

Functions here return dataclasses; only `report` makes text. Nothing is allocated: models are on the meta
device or made of fake tensors, and process groups exchange nothing.
"""
