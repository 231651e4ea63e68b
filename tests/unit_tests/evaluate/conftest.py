from tests.helpers.sampled_run import loaded, shards  # noqa: F401
