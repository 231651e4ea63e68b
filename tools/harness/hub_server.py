"""A stub of the Hugging Face hub for tests: repositories in memory, downloads by name."""

import hashlib
import http.server
import json
import re
import threading
from typing import Any

_COMMIT = "0" * 40


class HubServer(http.server.ThreadingHTTPServer):
    """Serves while it is used as a context manager.

    Attributes:
        files: "OWNER/NAME/PATH" -> content, of all models; datasets have "datasets/" before it.
        token: requests without it are answered with 401; empty: any may come.
        ranges: the Range headers of downloads.
    """

    daemon_threads = True

    def __init__(self, token: str = ""):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.token = token
        self.ranges: list[str | None] = []

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def names(self, repository: str) -> list[str]:
        found = (name for name in self.files if name.startswith(f"{repository}/"))
        return sorted(name.removeprefix(f"{repository}/") for name in found)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def do_GET(self) -> None:
        status, headers, answer = 401, {}, b"{}"
        if self.server.token in self.headers.get("Authorization", ""):
            status, headers, answer = self._answer(self.path.partition("?")[0])
        self.send_response(status)
        for name, value in {"Content-Length": str(len(answer)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_HEAD = do_GET

    def _answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(/.*)?", path):
            kind = "" if found[1] == "models" else "datasets/"
            return self._of_repository(kind + found[2], found[3] or "")
        if found := re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            content = self.server.files.get(f"{found[1]}/{found[2]}")
            if content is not None:
                headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
                return self._part(content, headers | {"X-Repo-Commit": _COMMIT})
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 404, {}, b"{}"

    def _part(self, content: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        """All of a file, or the range that is asked for."""
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        if wanted is None:
            return 200, headers, content
        start, _, last = wanted.removeprefix("bytes=").partition("-")
        part = content[int(start) : int(last) + 1]
        return 206, headers | {"Content-Range": f"bytes {start}-{last}/{len(content)}"}, part

    def _of_repository(self, name: str, path: str) -> tuple[int, dict[str, str], bytes]:
        names = self.server.names(name)
        if not names:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if found := re.fullmatch(r"/tree/[^/]+(?:/(.*))?", path):
            return 200, {}, json.dumps(self._tree(name, found[1] or "")).encode()
        siblings = [{"rfilename": each} for each in names]
        about = {"id": name.removeprefix("datasets/"), "sha": _COMMIT, "siblings": siblings}
        return 200, {}, json.dumps(about).encode()

    def _tree(self, name: str, folder: str) -> list[dict[str, Any]]:
        """Files below a folder, and the folders right below it."""
        inside = f"{folder}/" if folder else ""
        recursive = "recursive=true" in self.path.lower()
        found: dict[str, dict[str, Any]] = {}
        for path in self.server.names(name):
            if not path.startswith(inside):
                continue
            first, slash, _ = path.removeprefix(inside).partition("/")
            if slash and not recursive:
                found[first] = {"type": "directory", "path": inside + first, "oid": ""}
                continue
            content = self.server.files[f"{name}/{path}"]
            digest = hashlib.sha1(content).hexdigest()
            found[path] = {"type": "file", "path": path, "oid": digest, "size": len(content)}
        return list(found.values())
