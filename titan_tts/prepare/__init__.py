"""Audio and text -> shards of latent triplets."""
