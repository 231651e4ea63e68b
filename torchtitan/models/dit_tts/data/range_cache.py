"""Samples of remote tars in any order: many range requests at once, and a cache on disk.

>>> reader = RangeReader("/scratch/cache", cache_bytes=16 << 30)
>>> header, = reader.fetch([Extent("s3://corpus/000000.tar", size, version, start=0, stop=512)])

The processes of a machine may share the cache folder; see ``disk_cache``.
"""

from collections.abc import Sequence

from torchtitan.models.dit_tts.data import remote
from torchtitan.models.dit_tts.data.remote import Extent
from torchtitan.models.dit_tts.data.remote_cache import DiskCache
from torchtitan.models.dit_tts.data.remote_errors import changed

__all__ = ["Extent", "RangeReader"]


class RangeReader:
    """Reads extents of remote tars; any number of threads may do so at once.

    Args:
        cache_folder: where read bytes are kept; None: nowhere.
        cache_bytes: most disk that the folder takes; 0: nothing is kept.
        max_in_flight: most requests that wait for servers at once, over all threads.
    """

    def __init__(self, cache_folder: str | None, cache_bytes: int, max_in_flight: int = 64):
        self._client = remote.RangeClient(max_in_flight)
        self._cache = DiskCache(cache_folder, cache_bytes) if cache_folder and cache_bytes else None
        self._suspects: set[str] = set()

    def fetch(self, extents: Sequence[Extent]) -> list[bytes]:
        """The bytes of each extent, in order: from the cache, or else asked for all at once.

        Raises:
            InputError: a server that cannot be reached or ignores ranges, or a tar that changed.
        """
        found: dict[Extent, bytes] = {}
        missing: list[Extent] = []
        for extent in dict.fromkeys(extents):
            if not 0 <= extent.start <= extent.stop <= extent.size:
                raise ValueError(f"{extent} lies outside its tar.")
            data = b"" if extent.start == extent.stop else self._cached(extent)
            if data is None:
                missing.append(extent)
            else:
                found[extent] = data
        if missing:
            self._check_suspects(missing)
            fetched = self._client.fetch(missing)
            if self._cache is not None:
                self._cache.write(list(zip(missing, fetched, strict=True)))
            found.update(zip(missing, fetched, strict=True))
        return [found[extent] for extent in extents]

    def forget(self, extent: Extent) -> None:
        """Its bytes are not what they should be: the next fetch asks the server again, and first
        whether the tar is still the same."""
        if self._cache is not None:
            self._cache.forget(extent)
        self._suspects.add(extent.path)

    def _cached(self, extent: Extent) -> bytes | None:
        return None if self._cache is None else self._cache.read(extent)

    def _check_suspects(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            if extent.path not in self._suspects:
                continue
            self._suspects.discard(extent.path)
            found = remote.stat(extent.path, fresh=True)
            other_version = extent.version and found.version != extent.version
            if found.size != extent.size or other_version:
                raise changed(extent.path, extent.size, found.size)
