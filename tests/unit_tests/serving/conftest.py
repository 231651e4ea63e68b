from tests.helpers.sampled_run import shards  # noqa: F401
from tests.helpers.served import synthesizer  # noqa: F401
from tests.helpers.web_server import server  # noqa: F401
