"""Latents and waveforms from a model: the sampler, the length of a text, files of sound and pictures."""
