"""Stores behind a URL: a failure that may pass (a timeout, status 429 or 5xx) is tried again after a growing wait,
what cannot pass ends at once. Both end as an `InputError`: a store that cannot be reached makes no sample corrupt.
"""

import logging
import random
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit, urlunsplit

import xxhash

from torchtitan.models.dit_tts.errors import LEFT_OUT, InputError, require, without_secrets

logger = logging.getLogger(__name__)

TRIES = 5
# Waits of 0.5, 1.5, 4.5 and 13.5 seconds, each shortened at random by up to a quarter, so that
# the ranks of a job do not come back all at once.
FIRST_WAIT_SECONDS = 0.5
WAIT_FACTOR = 3.0

_CONNECT_SECONDS, _READ_SECONDS = 15, 60
# Above the requests in flight, or the client's own pool of connections (10 in botocore) is the limit.
_POOL_CONNECTIONS = 1024
_HUB_DATASETS = "datasets/"  # start of a dataset's path in the hub's filesystem

USE_RANGES = "use a server that supports HTTP Range requests or copy the shards to a local folder"

_Result = TypeVar("_Result")


class Stat(NamedTuple):
    """An object's bytes, and a number below 2**63 that changes with its content: a hash of its ETag or else of its
    modification time; 0 where the store gives neither."""

    size: int
    version: int


def shown(url: str) -> str:
    """The URL as messages name it: without a password and without the signature of its query."""
    try:
        parts = urlsplit(url)
    except ValueError:  # it is no URL, as the store will say
        return without_secrets(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec filesystem of `url`, the same for all URLs of a store, and the path in it.

    Options and credentials come from where each store's own tools take them and from fsspec's config files and
    FSSPEC_* variables. hf://OWNER/NAME is a dataset.
    """
    import fsspec

    protocol, _, rest = url.partition("://")
    require(bool(rest), f"{url} names nothing in its store; give a complete URL")
    # Their stores' own errors would repeat it, and a secret with a slash looks like a path.
    if protocol in ("s3", "s3a", "gs", "gcs") and re.match(r"(?!arn:)[^/]*:", rest):
        raise InputError(
            f"{protocol}://{LEFT_OUT}: has a user or a password before its bucket; leave them out, and set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if protocol == "hf" and not rest.startswith(_HUB_DATASETS):
        url = f"hf://{_HUB_DATASETS}{rest}"
    try:
        fsspec.get_filesystem_class(protocol)
        store, path = fsspec.core.url_to_fs(url, **_options(protocol))
    except ImportError as error:
        raise InputError(
            f"{shown(url)}: the package that reads '{protocol}://' is not installed "
            f'({_one_line(error)}); for s3 and http install it by pip install "titan-tts[remote]"'
        ) from None
    except Exception as error:  # stores have other arguments, and some connect here
        raise InputError(f"{shown(url)} is not a URL of a store ({_one_line(error)})") from None
    if protocol in ("s3", "s3a"):
        store.retries = 1  # retries are made here, once, and not by each layer below as well
    return store, path


def _options(protocol: str) -> dict[str, Any]:
    from fsspec.config import conf

    if protocol == "hf":
        from huggingface_hub import constants

        return {"endpoint": constants.ENDPOINT}
    if protocol in ("s3", "s3a"):
        configured = {**conf.get("s3", {}), **conf.get("s3a", {})}.get("config_kwargs", {})
        defaults = {"max_pool_connections": _POOL_CONNECTIONS, "retries": {"total_max_attempts": 1}}
        return {"config_kwargs": {**defaults, **configured}}
    if protocol in ("http", "https"):
        import aiohttp

        configured = {**conf.get("http", {}), **conf.get("https", {})}.get("client_kwargs", {})
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS
        )
        # A tar that is compressed on its way has other byte ranges.
        headers = {"Accept-Encoding": "identity"}
        defaults = {"trust_env": True, "timeout": timeout, "headers": headers}
        return {"client_kwargs": {**defaults, **configured}, "get_client": _http_client}
    return {}


async def _http_client(loop: Any = None, **options: Any) -> Any:
    import aiohttp

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), **options)


def call(
    url: str, doing: str, function: Callable[[], _Result], warned: set[int] | None = None
) -> _Result:
    """`function()`, which asks the store of `url`, tried again while its failure may pass. `doing`: "opened".
    `warned`: attempts of requests made together whose failure was said: when a store fails, hundreds do."""
    warned = set() if warned is None else warned
    for attempt in range(TRIES):
        try:
            return function()
        except InputError:
            raise
        except Exception as error:
            reason, advice, may_pass = _explain(error)
            if url.startswith("hf://") and not may_pass:
                advice = "check OWNER/NAME, @REVISION and the path; a private dataset needs HF_TOKEN of who may read it"
            if not may_pass or attempt == TRIES - 1:
                times = f", tried {attempt + 1} times" if attempt else ""
                raise InputError(
                    f"{shown(url)}: cannot be {doing} ({reason}{times}); {advice}"
                ) from None
        wait = FIRST_WAIT_SECONDS * WAIT_FACTOR**attempt * random.uniform(0.75, 1.0)
        if attempt not in warned:
            warned.add(attempt)
            again = f"trying again in {wait:.1f} s ({attempt + 2} of {TRIES})"
            logger.warning("%s: cannot be %s (%s); %s", shown(url), doing, reason, again)
        time.sleep(wait)
    raise AssertionError("not reached")


def stat(url: str, *, fresh: bool = False) -> Stat:
    """Size and version of the object at `url`. `fresh`: of now, not of a listing before."""
    store, path = filesystem(url)

    def ask() -> dict[str, Any]:
        if fresh:
            store.invalidate_cache(path)
        return store.info(path)

    info = call(url, "opened", ask)
    size = info.get("size")
    if info.get("type") == "directory":
        raise InputError(f"{shown(url)}: is a folder; a shard is one .tar file")
    if size is None or info.get("partial") is False:
        lacks = "does not give its size" if size is None else "refuses range requests"
        raise InputError(f"{shown(url)}: the server {lacks}; {USE_RANGES}")
    return Stat(int(size), _version(info))


def _version(info: dict[str, Any]) -> int:
    plain = {name.lower().replace("-", "").replace("_", ""): info[name] for name in info}
    for name in ("etag", "blobid", "lastmodified", "updated", "mtime", "modified", "created"):
        if plain.get(name):
            value = str(plain[name]).removeprefix("W/").strip('"')
            return xxhash.xxh3_64_intdigest(value.encode()) >> 1 or 1
    return 0


def _explain(error: BaseException) -> tuple[str, str, bool]:
    """(what happened, what to do, whether it may pass) of an exception from a store."""
    chain = _chain(error)
    kinds = {kind.__name__ for one in chain for kind in type(one).__mro__}
    status = status_of(error)
    if kinds & {"NoCredentialsError", "PartialCredentialsError"}:
        advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_ANON=true"
        return "no credentials found", advice, False
    if status in (401, 403) or "PermissionError" in kinds:
        status_text = f"status {status}: " if status else ""
        return f"{status_text}access denied", "check the credentials and their rights", False
    # HTTPFileSystem.info raises FileNotFoundError whatever happened; the cause tells what did.
    if status in (404, 410) or status is None and isinstance(chain[-1], FileNotFoundError):
        return "not found", "check the URL", False
    if status is not None:
        may_pass = status in (408, 425, 429) or status >= 500
        return f"status {status}", "see the server's own log or documentation", may_pass
    return _one_line(chain[-1]), "check the URL and the network, then start again", True


def status_of(error: BaseException) -> int | None:
    """The HTTP status among an exception and its causes: aiohttp's, botocore's, gcsfs's or the hub's."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        statuses = getattr(one, "status", None), getattr(response, "status_code", None)
        for value in (metadata.get("HTTPStatusCode"), *statuses):
            if isinstance(value, int) and value >= 400:
                return value
    return None


def _one_line(error: BaseException) -> str:
    text = without_secrets(" ".join(str(error).split()))
    return text[:300] if text else type(error).__name__


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while chain[-1].__cause__ is not None and len(chain) < 8:
        chain.append(chain[-1].__cause__)
    return chain
