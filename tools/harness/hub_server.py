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
        files: "OWNER/NAME/PATH" -> content, of all repositories.
        token: requests without it are answered with 401; empty: any may come.
        created: what repositories were asked for.
    """

    daemon_threads = True

    def __init__(self, token: str = ""):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.token = token
        self.created: list[dict[str, Any]] = []

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
            name = f"{asked['organization']}/{asked['name']}"
            return 200, {}, json.dumps({"url": f"{self.server.url}/{name}"}).encode()
        if path == "/api/validate-yaml":
            return 200, {}, json.dumps({"errors": [], "warnings": []}).encode()
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
            modes = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in json.loads(body)["files"]
            ]
            return 200, {}, json.dumps({"files": modes}).encode()
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    content = base64.b64decode(value["content"])
                    self.server.files[f"{found[1]}/{value['path']}"] = content
            address = f"{self.server.url}/{found[1]}/commit/{_COMMIT}"
            done = {"commitUrl": address, "commitOid": _COMMIT}
            return 200, {}, json.dumps(done).encode()
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path):
            tree = [
                {"type": "file", "path": name, "oid": "", "size": 0}
                for name in self.server.names(found[1])
            ]
            return 200, {}, json.dumps(tree).encode()
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            names = self.server.names(found[1])
            if not names:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
            siblings = [{"rfilename": name} for name in names]
            about = {"id": found[1], "sha": _COMMIT, "siblings": siblings}
            return 200, {}, json.dumps(about).encode()
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            content = self.server.files.get(f"{found[1]}/{found[2]}")
            if content is not None:
                headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
                return 200, headers | {"X-Repo-Commit": _COMMIT}, content
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 404, {}, b"{}"
