"""A stub of the Hugging Face hub for tests: repositories in memory, uploads as commits, downloads by name."""

import base64
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
        private: "OWNER/NAME" -> whether it is, of repositories that were asked for.
        created: what repositories were asked for.
        ranges: the Range headers of downloads.
    """

    daemon_threads = True

    def __init__(self, token: str = ""):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.token = token
        self.private: dict[str, bool] = {}
        self.created: list[dict[str, Any]] = []
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

    def do_GET(self) -> None:
        self._handle(b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._handle(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _handle(self, body: bytes) -> None:
        status, headers, answer = 401, {}, b"{}"
        if self.server.token in self.headers.get("Authorization", ""):
            status, headers, answer = self._answer(self.path.partition("?")[0], body)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(answer)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    def _answer(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        if path == "/api/repos/create":
            asked = json.loads(body)
            self.server.created.append(asked)
            kind = "datasets/" if asked.get("type") == "dataset" else ""
            name = f"{kind}{asked['organization']}/{asked['name']}"
            if name in self.server.private:  # `private` is not looked at
                return 409, {}, json.dumps({"url": f"{self.server.url}/{name}"}).encode()
            self.server.private[name] = (
                asked.get("private", False) or asked.get("visibility") == "private"
            )
            return 200, {}, json.dumps({"url": f"{self.server.url}/{name}"}).encode()
        if path == "/api/validate-yaml":
            return 200, {}, json.dumps({"errors": [], "warnings": []}).encode()
        if found := re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(/.*)?", path):
            kind = "" if found[1] == "models" else "datasets/"
            return self._of_repository(kind + found[2], found[3] or "", body)
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

    def _of_repository(
        self, name: str, path: str, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if path == "/preupload/main":
            modes = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]
            return 200, {}, json.dumps({"files": modes}).encode()
        if path == "/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "deletedFile":
                    del self.server.files[f"{name}/{line['value']['path']}"]
                if line["key"] == "file":
                    value = line["value"]
                    content = base64.b64decode(value["content"])
                    self.server.files[f"{name}/{value['path']}"] = content
            address = f"{self.server.url}/{name}/commit/{_COMMIT}"
            return 200, {}, json.dumps({"commitUrl": address, "commitOid": _COMMIT}).encode()
        names = self.server.names(name)
        if not names and name not in self.server.private:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if found := re.fullmatch(r"/tree/[^/]+(?:/(.*))?", path):
            return 200, {}, json.dumps(self._tree(name, found[1] or "")).encode()
        siblings = [{"rfilename": each} for each in names]
        about = {"id": name.removeprefix("datasets/"), "sha": _COMMIT, "siblings": siblings}
        about["private"] = self.server.private.get(name, False)
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
