"""The gate before a SuperLink: what nodes say passes unchanged, and whatever else is asked for does not exist."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "fedbayes[flower]"')

import httpx

from fedbayes.flower import gate as room

HEADERS = [(b"content-type", b"application/x-protobuf"), (b"x-node", b"7"), (b"host", b"public"), (b"te", b"trailers")]
FORBIDDEN = (
    ("POST", b"/v1/control/list-nodes", b""),
    ("POST", b"/v1/control/register-node", b""),
    ("POST", b"/v1/control/start-run", b""),
    ("POST", b"/v1/runtime/acquire-task", b""),
    ("POST", b"/v1/fleet/../control/start-run", b""),
    ("POST", b"/v1/fleet/%2e%2e/control/start-run", b""),
    ("POST", b"/v1/fleet/..%2fcontrol%2fstart-run", b""),
    ("POST", b"/v1/fleet//v1/control/start-run", b""),
    ("POST", b"//v1/fleet/get-run", b""),
    ("POST", b"/v1/fleet/", b""),
    ("POST", b"/v1/fleet/get-run/", b""),
    ("POST", b"/v1/fleet/get-run\n", b""),
    ("POST", b"/v1/fleet/get-run;/../../control", b""),
    ("POST", b"/v1/fleet/get-run", b"a=1"),
    ("POST", b"https://127.0.0.1/v1/control/start-run", b""),
    ("GET", b"/v1/fleet/get-run", b""),
    ("GET", b"/docs", b""),
    ("GET", b"/openapi.json", b""),
    ("GET", b"/", b""),
)


class SuperLink:
    """What stands behind the gate: it notes the requests that reach it."""

    def __init__(self, status: int = 200, failure: Exception | None = None) -> None:
        self.status, self.failure, self.requests = status, failure, []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.failure:
            raise self.failure
        return httpx.Response(self.status, stream=httpx.ByteStream(b"word"), headers={"x-said": "1"})


def ask(
    superlink: SuperLink,
    method: str,
    path: bytes,
    query: bytes = b"",
    chunks: tuple[bytes, ...] = (b"body",),
    more: Any = (),
) -> tuple[int, dict[bytes, bytes], bytes]:
    """A request to the gate as the server hands it over, and the answer."""
    events = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    events.append({"type": "http.request", "body": b"", "more_body": False})
    scope = {"type": "http", "method": method, "raw_path": path, "path": path.decode(), "query_string": query}
    sent: list[Any] = []

    async def receive() -> Any:
        return events.pop(0)

    async def send(event: Any) -> None:
        sent.append(event)

    async def call() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(superlink), base_url="https://link:1") as client:
            await room.gate(client)({**scope, "headers": [*HEADERS, *more]}, receive, send)

    asyncio.run(call())
    start, body = sent
    return start["status"], dict(start["headers"]), body["body"]


def test_what_a_node_says_passes_unchanged() -> None:
    superlink = SuperLink()
    status, headers, body = ask(superlink, "POST", b"/v1/fleet/push-object", chunks=(b"a" * 1000, b"b" * 7))
    assert (status, body, headers[b"x-said"], headers[b"content-length"]) == (200, b"word", b"1", b"4")
    (request,) = superlink.requests
    assert str(request.url) == "https://link:1/v1/fleet/push-object"
    assert request.content == b"a" * 1000 + b"b" * 7
    assert (request.headers["x-node"], request.headers["host"]) == ("7", "link:1")
    assert "te" not in request.headers


@pytest.mark.parametrize(("method", "path", "query"), FORBIDDEN, ids=[f"{m} {p.decode()!r}" for m, p, _ in FORBIDDEN])
def test_nothing_else_exists(method: str, path: bytes, query: bytes) -> None:
    superlink = SuperLink()
    assert ask(superlink, method, path, query)[0] == 404
    assert superlink.requests == []


def test_every_route_of_flower_that_is_not_the_nodes_is_closed() -> None:
    """The table is Flower's own, so that a route of another version is tested by existing."""
    from fastapi.routing import APIRoute, iter_route_contexts
    from flwr.superlink.main import create_app

    routes = [c.route for c in iter_route_contexts(create_app().routes) if isinstance(c.route, APIRoute)]
    paths = {route.path for route in routes}
    assert len(paths) > 50
    open_paths = {path for path in paths if ask(SuperLink(), "POST", path.encode())[0] == 200}
    assert open_paths == {path for path in paths if path.startswith("/v1/fleet/")}
    assert len(open_paths) > 8


@pytest.mark.parametrize("said", [b"1" * 30, b"-1", b"many", str(room.LARGEST + 1).encode()], ids=str)
def test_a_length_beyond_all_size_is_refused_unread(said: bytes) -> None:
    superlink = SuperLink()
    assert ask(superlink, "POST", b"/v1/fleet/push-object", more=[(b"content-length", said)])[0] == 413
    assert superlink.requests == []


def test_a_body_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LARGEST", 2500)
    superlink = SuperLink()
    assert ask(superlink, "POST", b"/v1/fleet/push-object", chunks=(b"a" * 1000,) * 3)[0] == 413
    assert ask(superlink, "POST", b"/v1/fleet/push-object", chunks=(b"a" * 1000,) * 2)[0] == 200


@pytest.mark.parametrize(
    ("failure", "status"),
    [(httpx.ConnectError("down"), 503), (httpx.ReadError("cut"), 503), (httpx.ReadTimeout("late"), 504)],
    ids=str,
)
def test_a_superlink_that_does_not_answer_is_said_as_nodes_understand_it(failure: Exception, status: int) -> None:
    assert ask(SuperLink(failure=failure), "POST", b"/v1/fleet/get-run")[0] == status


def test_a_refusal_of_the_superlink_comes_through() -> None:
    assert ask(SuperLink(401), "POST", b"/v1/fleet/activate-node")[::2] == (401, b"word")
