"""The networks: pure `nn.Module`s that know nothing of ranks, data or training."""
