"""The data stream: tar archives of triplets -> global order -> padded batches.

Read the files in the order a sample travels through them:

``shard_writer``  writes one tar of triplets (latents, reference, metadata)
``tar_members``   walks a tar strictly: damage is an error, never a short list
``index``         where every triplet of a tar lies; kept beside it as a sidecar
``archive``       ``open_dataset``, and reading any sample by offset
``buckets``       which few static shapes and batch sizes a run uses
``order``         which samples make up global batch number k
``dataloader``    fills the padded micro-batches of one rank, and its state
``build``         all of it from a job config

Nothing here knows about models.
"""
