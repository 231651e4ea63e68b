"""Byte ranges of remote tars in any order, by many requests at once."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

from torchtitan.models.dit_tts.data import remote
from torchtitan.models.dit_tts.errors import InputError


@dataclass(frozen=True)
class Extent:
    """Bytes [start, stop) of the object at `path`, which has `size` bytes and `version`
    (`Stat.version`; 0: unknown)."""

    path: str
    size: int
    version: int
    start: int
    stop: int


class RangeReader:
    """Reads extents of remote tars, from any thread. `max_in_flight`: requests that wait for servers at once."""

    def __init__(self, max_in_flight: int = 64):
        self._pool = ThreadPoolExecutor(max_in_flight, thread_name_prefix="range")
        self._place = cache(remote.filesystem)
        self._suspects: set[str] = set()

    def fetch(self, extents: Sequence[Extent]) -> list[bytes]:
        """The bytes of each extent, in order, requested all at once; the same extent is requested once."""
        wanted = [each for each in dict.fromkeys(extents) if each.start < each.stop]
        for each in wanted:
            self._check_suspect(each)
        warned: set[int] = set()
        requests = [self._pool.submit(self._read, each, warned) for each in wanted]
        try:
            found = {each: request.result() for each, request in zip(wanted, requests)}
        except BaseException:
            for request in requests:
                request.cancel()  # Ctrl-C: leave no requests behind
            raise
        return [found.get(extent, b"") for extent in extents]

    def suspect(self, path: str) -> None:
        """Bytes of a tar are not what they should be: the next fetch first asks whether it is still the same."""
        self._suspects.add(path)

    def _check_suspect(self, extent: Extent) -> None:
        if extent.path in self._suspects:
            self._suspects.discard(extent.path)
            found = remote.stat(extent.path, fresh=True)
            if found.size != extent.size or (extent.version and found.version != extent.version):
                raise _changed(extent)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, wanted: Extent, warned: set[int]) -> bytes:
        doing = f"read at bytes {wanted.start}-{wanted.stop - 1}"
        return remote.call(wanted.path, doing, lambda: self._request(wanted), warned)

    def _request(self, wanted: Extent) -> bytes:
        from fsspec.asyn import sync

        store, path = self._place(wanted.path)
        # The hub's filesystem, which has no asynchronous interface, would read blocks of megabytes.
        options = {} if store.async_impl else {"cache_type": "none"}
        try:
            if path.startswith(("http://", "https://")):
                data = sync(store.loop, _http_range, wanted, store, path)
            else:
                data = store.cat_file(path, start=wanted.start, end=wanted.stop, **options)
        except Exception as error:
            if remote.status_of(error) == 416:  # beyond its end
                raise _changed(wanted) from None
            raise
        if len(data) < wanted.stop - wanted.start:
            raise OSError("the answer was too short")
        if len(data) > wanted.stop - wanted.start:
            raise _ignores_ranges(wanted)
        return data


async def _http_range(wanted: Extent, store: Any, url: str) -> bytes:
    """fsspec's own request would hold all of a tar in memory, for each sample, if the server ignores Range."""
    session = await store.set_session()
    headers = store.kwargs.get("headers", {}) | {"Range": f"bytes={wanted.start}-{wanted.stop - 1}"}
    options = store.kwargs | {"headers": headers}
    async with session.get(store.encode_url(url), **options) as answer:
        answer.raise_for_status()
        size = wanted.stop - wanted.start
        if answer.status != 206 and answer.content_length != size:
            raise _ignores_ranges(wanted)
        data = b""
        # One byte more than was asked for tells that the answer is another.
        while len(data) <= size and (part := await answer.content.read(size + 1 - len(data))):
            data += part
        return data


def _ignores_ranges(extent: Extent) -> InputError:
    name = remote.shown(extent.path)
    return InputError(f"{name}: the server ignores range requests; {remote.USE_RANGES}")


def _changed(extent: Extent) -> InputError:
    return InputError(
        f"{remote.shown(extent.path)}: has another content than its index was made from; shards must not change "
        "during a run, so start again"
    )
