"""The data stream: tar archives of triplets -> global order -> padded batches.

Read the files in the order a sample travels through them:

``shard_writer``  writes one tar of triplets (latents, reference, metadata)
``archive``       parses a tar strictly and finds every member's bytes
``index``         the sidecar index of a tar, and ``open_dataset``
``buckets``       which few static shapes and batch sizes a run uses
``order``         which samples make up global batch number k
``dataloader``    fills the padded micro-batches of one rank, and its state
``build``         all of it from a job config

Nothing here knows about models.
"""
