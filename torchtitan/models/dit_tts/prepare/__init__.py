"""Audio and text -> archives of latent triplets."""
