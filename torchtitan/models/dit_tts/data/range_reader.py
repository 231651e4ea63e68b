"""Samples of remote tars in any order, by many range requests at once."""

from collections.abc import Sequence

from torchtitan.models.dit_tts.data import remote
from torchtitan.models.dit_tts.data.remote import Extent


class RangeReader:
    """Reads extents of remote tars; any number of threads may do so at once.

    Args:
        max_in_flight: maximum requests that wait for servers at once, over all threads.
    """

    def __init__(self, max_in_flight: int = 64):
        self._client = remote.RangeClient(max_in_flight)
        self._suspects: set[str] = set()

    def fetch(self, extents: Sequence[Extent]) -> list[bytes]:
        """The bytes of each extent, in order, requested all at once; the same extent is requested once."""
        wanted = [each for each in dict.fromkeys(extents) if each.start < each.stop]
        assert all(0 <= each.start and each.stop <= each.size for each in wanted)
        self._check_suspects(wanted)
        found = dict(zip(wanted, self._client.fetch(wanted) if wanted else (), strict=True))
        return [found.get(extent, b"") for extent in extents]

    def suspect(self, extent: Extent) -> None:
        """Its bytes are not what they should be: the next fetch first asks whether the tar is still the same."""
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
