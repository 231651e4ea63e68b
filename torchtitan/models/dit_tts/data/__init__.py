"""The data stream: shards of samples -> global order -> padded batches. Nothing here knows about models.

Six files are the spine, in the order in which a sample travels:

`dataset`          opens shards and reads any sample by offset
`batch_sampler`    which samples make up global batch number k
`row_loader`       loads one row of a batch: what it is, and where it is written
`collate`          makes a micro-batch of such rows, padded or packed
`dataloader`       the micro-batches of one rank in their order, and its state
`build`            all of it from a job config

The others serve one of these. For `dataset`: `members` (the table of a sample's members; a new array is one line in it),
`shard_writer` and `tar_reader` (one tar, written and walked), `shard` and `index` (where every sample lies; stored as a
sidecar), `extents` (where its bytes lie), `storage`, `remote` and `range_reader` (files and URLs). For `batch_sampler`: `buckets` and
`packed_rows` (static shapes, batch sizes and rows), `sampling_weights`. For `row_loader` and `collate`: `references`,
`corrupt_samples`. For `dataloader`: `prefetch`. `heldout`, `leak` and `left_out` answer one question each.
"""
