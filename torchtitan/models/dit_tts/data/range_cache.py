"""Samples of remote tars in any order: many range requests at once, and a cache on disk.

>>> reader = RangeReader("/scratch/cache", cache_bytes=16 << 30)
>>> header, = reader.fetch([Extent("s3://corpus/000000.tar", size, version, start=0, stop=512)])

The processes of a machine may use one cache folder; see `remote_cache`.
"""

from collections.abc import Sequence

from torchtitan.models.dit_tts.data import remote
from torchtitan.models.dit_tts.data.remote import Extent
from torchtitan.models.dit_tts.data.remote_cache import DiskCache

__all__ = ["Extent", "RangeReader"]


class RangeReader:
    """Reads extents of remote tars; any number of threads may do so at once.

    Args:
        cache_folder: where read bytes are kept; None: nowhere.
        cache_bytes: maximum disk that the folder takes; 0: nothing is kept.
        max_in_flight: maximum requests that wait for servers at once, over all threads.
    """

    def __init__(self, cache_folder: str | None, cache_bytes: int, max_in_flight: int = 64):
        self._client = remote.RangeClient(max_in_flight)
        self._cache = DiskCache(cache_folder, cache_bytes) if cache_folder and cache_bytes else None
        self._suspects: set[str] = set()

    def fetch(self, extents: Sequence[Extent]) -> list[bytes]:
        """The bytes of each extent, in order: from the cache, or else requested all at once.

        Raises:
            InputError: a server that cannot be reached or ignores ranges, or a tar that changed.
        """
        found: dict[Extent, bytes] = {}
        missing: list[Extent] = []
        for extent in dict.fromkeys(extents):
            assert 0 <= extent.start <= extent.stop <= extent.size
            data = b"" if extent.start == extent.stop else None
            if data is None and self._cache is not None:
                data = self._cache.read(extent)
            if data is None:
                missing.append(extent)
            else:
                found[extent] = data
        if missing:
            self._check_suspects(missing)
            fetched = list(zip(missing, self._client.fetch(missing), strict=True))
            if self._cache is not None:
                self._cache.write(fetched)
            found.update(fetched)
        return [found[extent] for extent in extents]

    def forget(self, extent: Extent) -> None:
        """Its bytes are not what they should be: the next fetch asks the server again, and first
        whether the tar is still the same."""
        if self._cache is not None:
            self._cache.forget(extent)
        self._suspects.add(extent.path)

    def _check_suspects(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            if extent.path not in self._suspects:
                continue
            self._suspects.discard(extent.path)
            found = remote.stat(extent.path, fresh=True)
            other_version = extent.version and found.version != extent.version
            if found.size != extent.size or other_version:
                raise remote.changed(extent, found.size)
