"""Byte ranges of remote tars in any order, by many requests at once on fsspec's own event loop."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
        self._semaphore = asyncio.Semaphore(max_in_flight)
        # For filesystems without an asynchronous interface; its threads start when needed.
        self._pool = ThreadPoolExecutor(max_in_flight, thread_name_prefix="range")
        self._places: dict[str, tuple[Any, str]] = {}
        self._suspects: set[str] = set()

    def fetch(self, extents: Sequence[Extent]) -> list[bytes]:
        """The bytes of each extent, in order, requested all at once; the same extent is requested once."""
        from fsspec.asyn import get_loop

        wanted = [each for each in dict.fromkeys(extents) if each.start < each.stop]
        for each in wanted:
            assert 0 <= each.start and each.stop <= each.size
            self._check_suspect(each)
            if each.path not in self._places:
                self._places[each.path] = _range_store(each.path)
        future = asyncio.run_coroutine_threadsafe(self._gather(wanted), get_loop())
        try:
            found = dict(zip(wanted, future.result(), strict=True))
        except BaseException:
            future.cancel()  # Ctrl-C: leave no requests behind
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
                raise changed(extent, found.size)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _gather(self, extents: Sequence[Extent]) -> list[bytes]:
        warned: set[int] = set()
        tasks = [asyncio.ensure_future(self._read(wanted, warned)) for wanted in extents]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()  # without effect on those that are done

    async def _read(self, wanted: Extent, warned: set[int]) -> bytes:
        doing = f"read at bytes {wanted.start}-{wanted.stop - 1}"
        for attempt in range(remote.TRIES):
            try:
                async with self._semaphore:
                    return await self._request(wanted)
            except InputError:
                raise
            except Exception as error:
                is_last = attempt == remote.TRIES - 1
                # Asked beyond the end, or never answered to the end.
                if remote.status_of(error) == 416 or is_last and isinstance(error, _ShortAnswer):
                    raise changed(wanted) from None
                # Hundreds of requests fail together when a store does: one warning for all.
                is_new = attempt not in warned
                wait = remote.wait_seconds(wanted.path, doing, error, attempt, is_new)
                warned.add(attempt)
            await asyncio.sleep(wait)
        raise AssertionError("not reached")

    async def _request(self, wanted: Extent) -> bytes:
        store, path = self._places[wanted.path]
        start, stop = wanted.start, wanted.stop
        if path.startswith(("http://", "https://")):
            data = await _http_range(wanted, store, path)
        elif store.async_impl:
            data = await store._cat_file(path, start=start, end=stop)
        else:
            data = await asyncio.get_running_loop().run_in_executor(
                self._pool, lambda: store.cat_file(path, start=start, end=stop)
            )
        if len(data) < stop - start:
            raise _ShortAnswer("the answer was too short")
        if len(data) > stop - start:
            raise _ignores_ranges(wanted)
        return data


async def _http_range(wanted: Extent, store: Any, url: str) -> bytes:
    """fsspec's own request would read all of the tar from a server that ignores Range."""
    session = await store.set_session()
    headers = {
        **store.kwargs.get("headers", {}),
        "Range": f"bytes={wanted.start}-{wanted.stop - 1}",
        "Accept-Encoding": "identity",
    }
    async with session.get(store.encode_url(url), **{**store.kwargs, "headers": headers}) as answer:
        answer.raise_for_status()
        if answer.status != 206:
            is_all = (wanted.start, wanted.stop) == (0, wanted.size)
            if not is_all or answer.content_length != wanted.size:
                raise _ignores_ranges(wanted)
        total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        if total.isdigit() and int(total) != wanted.size:
            raise changed(wanted, int(total))
        return await answer.read()


class _ShortAnswer(OSError):
    """Fewer bytes than asked for: a broken transfer, or an object that has become shorter."""


def changed(extent: Extent, found: int | None = None) -> InputError:
    """The object is no longer the one of `extent`; it has `found` bytes."""
    has = "has another content than its index was made from"
    if found not in (None, extent.size):
        has = f"has {found} bytes, but its index was made from {extent.size}"
    return InputError(
        f"{remote.shown(extent.path)}: {has}; shards must not change during a run, so start again"
    )


def _ignores_ranges(extent: Extent) -> InputError:
    name = remote.shown(extent.path)
    return InputError(f"{name}: the server ignores range requests; {remote.USE_RANGES}")


def _range_store(url: str) -> tuple[Any, str]:
    """The filesystem that ranges of an object are asked for, and the path in it: that of `url`, but for the hub its
    web address, as the hub's filesystem reads blocks of megabytes."""
    store, path = remote.filesystem(url)
    if not url.startswith("hf://"):
        return store, path
    import fsspec
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    found = remote.call(url, "opened", lambda: store.resolve_path(path))
    address = hf_hub_url(
        found.repo_id, found.path_in_repo, repo_type=found.repo_type, revision=found.revision
    )
    # A redirection to another host goes without the token.
    return fsspec.core.url_to_fs(
        address, headers=build_hf_headers(), **remote.store_options("https")
    )
