"""What is in a dataset of archives, and what is wrong with it: `titan-tts data inspect | doctor`.

``summary``        statistics from the indexes alone
``measure``        one pass over every array and JSON, in threads, a few numbers a sample
``checks``         indexes and measurements -> findings (``findings`` lists the kinds)
``shard_records``  shards against the sizes and digests that prepare.json recorded
``suggest``        length buckets and batch sizes, and what padding they cost
``pictures``, ``report``  plots and the HTML page
``inspect_command``, ``doctor_command``  the two commands, ``options`` what they share

Everything but the commands is functions of a data/archive.Dataset and plain settings.
"""
