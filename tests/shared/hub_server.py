"""A stand-in for the Hugging Face Hub on this machine: repositories in memory, the few calls that uploads and downloads
make. It takes every file inline, so that no large-file storage is needed."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

SHA = "a" * 40


class Hub(ThreadingHTTPServer):
    """Files by repository and name, and which repositories are private."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """What huggingface_hub asks for."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Silence."""

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self._body()
        if path == "/api/repos/create":
            asked = json.loads(body)
            owner = asked.get("organization")
            repo = f"{owner}/{asked['name']}" if owner else asked["name"]
            self.server.private[repo] = asked.get("private", asked.get("visibility") == "private")
            self.server.repos.setdefault(repo, {})
            return self._json({"url": f"{self.server.address}/{repo}", "name": repo, "id": repo})
        if match := re.fullmatch(r"/api/models/(.+?)/preupload/.+", path):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        if match := re.fullmatch(r"/api/models/(.+?)/commit/.+", path):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.repos[match[1]][line["value"]["path"]] = content
            url = f"{self.server.address}/{match[1]}/commit/{SHA}"
            return self._json({"success": True, "commitOid": SHA, "commitUrl": url, "hookOutput": ""})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        return self._json({"error": f"no such call: {path}"}, 404)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/.+)?", path):
            files = self.server.repos.get(match[1])
            if files is None:
                return self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            rows = [{"rfilename": name, "size": len(content), "blobId": "b"} for name, content in files.items()]
            return self._json({"id": match[1], "sha": SHA, "siblings": rows, "tags": [], "private": True})
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            content = self.server.repos.get(match[1], {}).get(match[2])
            if content is None:
                return self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return self._answer(content, "application/octet-stream")
        return self._json({"error": f"no such page: {path}"}, 404)

    do_HEAD = do_GET

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _json(self, value: object, status: int = 200, more: dict[str, str] | None = None) -> None:
        self._answer(json.dumps(value).encode(), "application/json", status, more)

    def _answer(self, content: bytes, kind: str, status: int = 200, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        tag = hashlib.sha256(content).hexdigest()
        head = {"Content-Type": kind, "Content-Length": str(len(content)), "ETag": f'"{tag}"', "X-Repo-Commit": SHA}
        for name, value in {**head, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that answers while this is open."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
