from tests.helpers.sampled_run import loaded, shards  # noqa: F401
from tests.helpers.served import synthesizer  # noqa: F401
