"""What a run will need, computed before it starts: parameters, memory, downloads, arithmetic.

Functions here return dataclasses; `report` alone makes text of them. Nothing is allocated: models
are on the meta device or fake, and process groups exchange nothing.
"""
