"""A web server of one folder for tests: ranges, ETags, a listing, and failures on demand."""

import http.server
import os
import re
import threading
from collections import Counter
from pathlib import Path


class FolderServer(http.server.ThreadingHTTPServer):
    """Serves `folder` while it is used as a context manager; `url` has no slash at its end.

    It also answers as S3 does to a path-style GetObject or HeadObject, the first folder being the
    bucket.

    Attributes, which may be set at any time:
        hold_until: answers wait until so many requests were in flight at once (20 s at most).
        fail_first: so many of the next GET requests are answered with `fail_status`.
        honour_ranges: False to send complete files whatever is asked.
        whole_status: of an answer with a complete file.
        deny: names that are answered with 403.
        requests: count of the requests, by method.
        targets: what was asked for, path and query.
        peak_in_flight: maximum number of requests that were in flight at once.
    """

    daemon_threads = True
    request_queue_size = 512  # hundreds of connections begin at once

    def __init__(self, folder: str | Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = Path(folder)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.hold_until = 0
        self.fail_first = 0
        self.fail_status = 503
        self.honour_ranges = True
        self.whole_status = 200
        self.deny: set[str] = set()
        self.requests: Counter[str] = Counter()
        self.targets: set[str] = set()
        self.peak_in_flight = 0
        self._in_flight = 0
        self._changed = threading.Condition()

    def __enter__(self) -> "FolderServer":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Print nothing: clients that were killed leave broken connections."""

    def begin(self, method: str, target: str) -> bool:
        """Count a request; return whether it is to fail."""
        with self._changed:
            self.requests[method] += 1
            self.targets.add(target)
            self._in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self._in_flight)
            fails = method == "GET" and self.fail_first > 0
            self.fail_first -= fails
            self._changed.notify_all()
            if not self._changed.wait_for(
                lambda: self.peak_in_flight >= self.hold_until, timeout=20
            ):
                self.hold_until = 0  # they never come: let the test fail by its own check
                self._changed.notify_all()
        return fails

    def end(self) -> None:
        with self._changed:
            self._in_flight -= 1


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept, as real servers do
    disable_nagle_algorithm = True
    wbufsize = 1 << 20  # headers and body leave in one packet
    server: FolderServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        fails = self.server.begin(self.command, self.path)
        try:
            # Before the answer leaves, or the next request may be counted first.
            status, headers, body = self._prepare(fails)
        finally:
            self.server.end()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _prepare(self, fails: bool) -> tuple[int, dict[str, str], bytes]:
        path = self.server.folder / self.path.partition("?")[0].strip("/")
        if fails:
            return self.server.fail_status, {}, b""
        if path.name in self.server.deny:
            return 403, {}, b""
        if path.is_dir():
            links = "".join(f'<a href="{name}">{name}</a>\n' for name in sorted(os.listdir(path)))
            return 200, {"Content-Type": "text/html"}, f"<a href='../'>up</a>\n{links}".encode()
        if not path.is_file():
            return 404, {}, b""
        found = path.stat()
        headers = {"ETag": f'"{found.st_mtime_ns:x}-{found.st_size:x}"'}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        with open(path, "rb") as file:
            if asked is None or not self.server.honour_ranges:
                return self.server.whole_status, headers, file.read()
            start, stop = int(asked[1]), min(int(asked[2]) + 1, found.st_size)
            if start >= found.st_size:
                return 416, {**headers, "Content-Range": f"bytes */{found.st_size}"}, b""
            file.seek(start)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{found.st_size}"
            return 206, headers, file.read(stop - start)
