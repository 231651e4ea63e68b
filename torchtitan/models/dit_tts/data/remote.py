"""Requests to stores behind a URL: bounded in number, retried, their failures one sentence each.

Every request runs on fsspec's own event loop, so that hundreds may wait for a server while no
thread of ours does. A failure that may pass (a timeout, a broken connection, status 429 or 5xx)
is tried again after a growing wait; what cannot pass (not found, no rights, a server without
range requests) ends at once. Both end as an ``InputError``: that a store cannot be reached says
nothing about the samples in it.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import xxhash

from torchtitan.models.dit_tts.data.remote_errors import (
    changed,
    explain,
    failed,
    ignores_ranges,
    one_line,
    shown,
    status_of,
)
from torchtitan.models.dit_tts.errors import InputError

logger = logging.getLogger(__name__)

TRIES = 5
# Waits of 0.5, 1.5, 4.5 and 13.5 seconds, each shortened at random by up to a quarter, so that
# the ranks of a job do not come back all at once.
FIRST_WAIT_SECONDS = 0.5
WAIT_FACTOR = 3.0

_CONNECT_SECONDS, _READ_SECONDS = 15, 60
# Above what is in flight, or the client's own pool of connections (10 in botocore) is the limit.
_POOL_CONNECTIONS = 1024

_Result = TypeVar("_Result")


class Stat(NamedTuple):
    """What a store says of an object: its bytes, and a number that changes with its content.

    version: xxh3_64 of its ETag or, where it has none, of its modification time, below 2**63;
    0 where the store tells neither.
    """

    size: int
    version: int


@dataclass(frozen=True)
class Extent:
    """Bytes [start, stop) of the object at ``path``, which has ``size`` bytes and ``version``
    (``Stat.version``; 0: unknown)."""

    path: str
    size: int
    version: int
    start: int
    stop: int


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec filesystem of ``url`` and the path in it; made once for all URLs of a store.

    Options and credentials come from where each store's own tools take them (for S3
    AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ~/.aws ...; for http(s) ~/.netrc and HTTP_PROXY) and from
    fsspec's config files and FSSPEC_* variables.

    Raises:
        InputError: no such scheme, or the package for it is not installed.
    """
    import fsspec
    from fsspec.registry import known_implementations

    protocol = url.split("://", 1)[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise InputError(
            f"{shown(url)}: '{protocol}://' is no known kind of store; use s3://, http://, "
            "https:// or another scheme of fsspec."
        ) from None
    except ImportError:
        if protocol in ("s3", "s3a", "http", "https"):
            remedy = 'install it by pip install "titan-tts[remote]"'
        else:
            hint = known_implementations.get(protocol, {}).get("err", "install what fsspec needs")
            remedy = hint.rstrip(".")
        raise InputError(
            f"{shown(url)}: the package that reads '{protocol}://' is not installed; {remedy}."
        ) from None
    try:
        store, path = fsspec.core.url_to_fs(url, **_options(protocol))
    except Exception as error:
        raise InputError(
            f"{shown(url)}: the store cannot be used ({one_line(error)}); check the URL and the "
            "settings of its package."
        ) from None
    if protocol in ("s3", "s3a"):
        store.retries = 1  # retries are made here, once, and not by each layer below as well
    return store, path


def _options(protocol: str) -> dict[str, Any]:
    from fsspec.config import conf

    if protocol in ("s3", "s3a"):
        configured = {**conf.get("s3", {}), **conf.get("s3a", {})}.get("config_kwargs", {})
        defaults = {
            "max_pool_connections": _POOL_CONNECTIONS,
            "retries": {"total_max_attempts": 1},
        }
        return {"config_kwargs": {**defaults, **configured}}
    if protocol in ("http", "https"):
        import aiohttp

        configured = {**conf.get("http", {}), **conf.get("https", {})}.get("client_kwargs", {})
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS
        )
        defaults = {"trust_env": True, "timeout": timeout}
        return {"client_kwargs": {**defaults, **configured}, "get_client": _http_client}
    return {}


async def _http_client(loop: Any = None, **options: Any) -> Any:
    import aiohttp

    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), **options)


def call(url: str, doing: str, function: Callable[[], _Result]) -> _Result:
    """``function()``, which asks the store of ``url``, tried again while its failure may pass.

    Args:
        doing: what it does, for the sentence: "cannot be {doing}".
    """
    for attempt in range(TRIES):
        try:
            return function()
        except InputError:
            raise
        except Exception as error:
            reason, advice, may_pass = explain(error)
            if not may_pass or attempt == TRIES - 1:
                raise failed(url, doing, reason, advice, attempt + 1) from None
        wait = _wait_seconds(attempt)
        logger.warning("%s: cannot be %s (%s); again in %.1f s", shown(url), doing, reason, wait)
        time.sleep(wait)
    raise AssertionError("not reached")


def stat(url: str, *, fresh: bool = False) -> Stat:
    """Size and version of the object at ``url``.

    Args:
        fresh: ask the store even where a listing just told.

    Raises:
        InputError: not found, no rights, unreachable, or a size or ranges it does not give.
    """
    store, path = filesystem(url)
    if fresh:
        store.invalidate_cache(path)
    info = call(url, "opened", lambda: store.info(path))
    size = info.get("size")
    if info.get("type") == "directory":
        raise InputError(f"{shown(url)}: is a folder; a shard is one .tar file.")
    if size is None or info.get("partial") is False:
        lacks = "does not tell its size" if size is None else "refuses range requests"
        raise InputError(
            f"{shown(url)}: the server {lacks}; use a server that supports HTTP Range requests or "
            "copy the shards to a local folder."
        )
    return Stat(int(size), _version(info))


def _version(info: dict[str, Any]) -> int:
    plain = {name.lower().replace("-", "").replace("_", ""): info[name] for name in info}
    for name in ("etag", "lastmodified", "updated", "mtime", "modified", "created"):
        if plain.get(name):
            value = str(plain[name]).removeprefix("W/").strip('"')
            return xxhash.xxh3_64_intdigest(value.encode()) >> 1 or 1
    return 0


class RangeClient:
    """Range requests, at most ``max_in_flight`` waiting for servers at once, from any thread."""

    def __init__(self, max_in_flight: int):
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; it must be at least 1.")
        self.max_in_flight = max_in_flight
        self._semaphore = asyncio.Semaphore(max_in_flight)
        # For filesystems without an asynchronous interface; its threads start when needed.
        self._pool = ThreadPoolExecutor(max_in_flight, thread_name_prefix="range")
        self._places: dict[str, tuple[Any, str]] = {}

    def fetch(self, extents: Sequence[Extent]) -> list[bytes]:
        """The bytes of each extent, in order.

        Raises:
            InputError: one of them cannot be had; the others are then given up.
        """
        if not extents:
            return []
        return _result(self.submit(extents))

    def submit(self, extents: Sequence[Extent]) -> "Future[list[bytes]]":
        """``fetch`` without waiting for it."""
        from fsspec.asyn import get_loop

        places = [self._place(wanted.path) for wanted in extents]
        return asyncio.run_coroutine_threadsafe(self._gather(extents, places), get_loop())

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _place(self, url: str) -> tuple[Any, str]:
        place = self._places.get(url)
        if place is None:
            place = self._places[url] = filesystem(url)
        return place

    async def _gather(
        self, extents: Sequence[Extent], places: Sequence[tuple[Any, str]]
    ) -> list[bytes]:
        warned: set[int] = set()
        tasks = [
            asyncio.ensure_future(self._read(wanted, store, path, warned))
            for wanted, (store, path) in zip(extents, places, strict=True)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # without effect on those that are done

    async def _read(self, wanted: Extent, store: Any, path: str, warned: set[int]) -> bytes:
        for attempt in range(TRIES):
            try:
                async with self._semaphore:
                    return await self._request(wanted, store, path)
            except InputError:
                raise
            except _ShortAnswer as error:
                if attempt == TRIES - 1:
                    raise changed(wanted.path, wanted.size, wanted.start + error.count) from None
                reason = "the answer was too short"
            except Exception as error:
                if status_of(error) == 416:  # asked beyond the end
                    raise changed(wanted.path, wanted.size) from None
                reason, advice, may_pass = explain(error)
                if not may_pass or attempt == TRIES - 1:
                    doing = f"read at bytes {wanted.start}-{wanted.stop - 1}"
                    raise failed(wanted.path, doing, reason, advice, attempt + 1) from None
            wait = _wait_seconds(attempt)
            # Hundreds of requests fail together when a store does.
            if attempt not in warned:
                warned.add(attempt)
                logger.warning(
                    "%s: reading bytes %d-%d failed (%s); again in %.1f s",
                    shown(wanted.path),
                    wanted.start,
                    wanted.stop - 1,
                    reason,
                    wait,
                )
            await asyncio.sleep(wait)
        raise AssertionError("not reached")

    async def _request(self, wanted: Extent, store: Any, path: str) -> bytes:
        if wanted.path.startswith(("http://", "https://")):
            data = await _http_range(wanted, store, path)
        elif store.async_impl:
            data = await store._cat_file(path, start=wanted.start, end=wanted.stop)
        else:
            data = await asyncio.get_running_loop().run_in_executor(
                self._pool, lambda: store.cat_file(path, start=wanted.start, end=wanted.stop)
            )
        if len(data) < wanted.stop - wanted.start:
            raise _ShortAnswer(len(data))
        if len(data) > wanted.stop - wanted.start:
            raise ignores_ranges(wanted.path, wanted.start, wanted.stop)
        return data


async def _http_range(wanted: Extent, store: Any, url: str) -> bytes:
    """fsspec's own request would read the whole tar from a server that ignores Range."""
    session = await store.set_session()
    headers = {
        **store.kwargs.get("headers", {}),
        "Range": f"bytes={wanted.start}-{wanted.stop - 1}",
        "Accept-Encoding": "identity",
    }
    async with session.get(store.encode_url(url), **{**store.kwargs, "headers": headers}) as answer:
        answer.raise_for_status()
        if answer.status != 206:
            whole = (wanted.start, wanted.stop) == (0, wanted.size)
            if not whole or answer.content_length != wanted.size:
                raise ignores_ranges(wanted.path, wanted.start, wanted.stop)
        total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        if total.isdigit() and int(total) != wanted.size:
            raise changed(wanted.path, wanted.size, int(total))
        return await answer.read()


class _ShortAnswer(Exception):
    """Fewer bytes than asked for: a broken transfer, or an object that has become shorter."""

    def __init__(self, count: int):
        self.count = count


def _result(future: "Future[_Result]") -> _Result:
    try:
        return future.result()
    except BaseException:
        future.cancel()  # Ctrl-C: leave no requests behind
        raise


def _wait_seconds(attempt: int) -> float:
    return FIRST_WAIT_SECONDS * WAIT_FACTOR**attempt * random.uniform(0.75, 1.0)
