"""The data stream: shards of samples -> global order -> padded batches.

Read the files in the order a sample travels through them:

`members`          the table of a sample's members; a new array is one line in it
`shard_writer`     writes one tar of samples (latents, reference, metadata)
`tar_reader`       walks a tar strictly: corruption is an error, never a short list
`parquet_shard`    the same as a Parquet file, written and walked
`shard`, `index`   where every sample of a shard lies; stored beside it as a sidecar
`dataset`          `open_dataset`, and reading any sample by offset
`storage`, `remote`, `range_reader`   files and URLs, and samples of the latter in any order
`buckets`          which few static shapes and batch sizes a run uses
`batch_sampler`    which samples make up global batch number k
`row_loader`       loads a sample into its row of a padded batch
`packed_rows`      instead of buckets: rows that whole samples fill, and their order
`collate`          makes a padded micro-batch of such rows
`dataloader`       the micro-batches of one rank in their order, and its state
`build`            all of it from a job config

Nothing here knows about models.
"""
