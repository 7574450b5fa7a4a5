"""The public port of a SuperLink: of all that Flower offers on its one port, only the nodes' interface passes.

Flower 1.41 answers nodes (`/v1/fleet/`), operators (`/v1/control/`: start an app, register a key) and its own processes
(`/v1/runtime/`) on one port, and asks only nodes who they are. So the SuperLink listens on this machine alone, and the
gate hands on what nodes say, byte for byte; whatever else is asked for does not exist here.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from fedbayes.errors import InputError

NODES = re.compile(rb"/v1/fleet/[a-z-]{1,64}")  # the whole path; without dots, escapes and doubled slashes
LARGEST = 32 * 2**20  # bytes of a request; Flower cuts arrays into pieces of 5 MiB
AT_ONCE = 64  # requests on their way at the same time: they bound the memory that strangers can take
PATIENCE = 60.0  # seconds for a request and its answer
HOP = frozenset({b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"host"})

Letter = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Letter]]
Send = Callable[[Letter], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class Refusal(Exception):
    """A request that is not handed on, and the status that says why."""

    def __init__(self, status: int) -> None:
        self.status = status


def gate(client: httpx.AsyncClient) -> Callable[[Letter, Receive, Send], Awaitable[None]]:
    """An ASGI application that hands the requests of nodes to the client's SuperLink."""
    places = asyncio.Semaphore(AT_ONCE)

    async def answer(scope: Letter, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            path = node_path(scope)
            async with places, asyncio.timeout(PATIENCE):
                body = await whole(scope["headers"], receive)
                status, headers, content = await handed_on(client, path, scope["headers"], body)
        except Refusal as refusal:
            status, headers, content = refusal.status, [], b""
        except TimeoutError:
            status, headers, content = 504, [], b""
        headers = [*headers, (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    return answer


def node_path(scope: Letter) -> str:
    """The path of a request that a node may make; everything else is not found."""
    path = scope.get("raw_path") or b""
    if scope["method"] != "POST" or scope["query_string"] or not NODES.fullmatch(path):
        raise Refusal(404)
    return str(path.decode("ascii"))


async def whole(headers: Headers, receive: Receive) -> bytes:
    """The body of a request, refused as soon as it is known to be too large."""
    for name, value in headers:
        if name == b"content-length" and (not value.isdigit() or int(value[:20]) > LARGEST):
            raise Refusal(413)
    body = bytearray()
    more = True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise Refusal(400)
        body += event.get("body", b"")
        more = event.get("more_body", False)
        if len(body) > LARGEST:
            raise Refusal(413)
    return bytes(body)


async def handed_on(client: httpx.AsyncClient, path: str, headers: Headers, body: bytes) -> tuple[int, Headers, bytes]:
    """The SuperLink's answer; 503 while there is none, at which nodes try again."""
    passed = [(k, v) for k, v in headers if k not in HOP and k != b"content-length"]
    try:
        async with client.stream("POST", path, headers=passed, content=body) as response:
            content = b"".join([chunk async for chunk in response.aiter_raw()])
    except httpx.TimeoutException:
        raise Refusal(504) from None
    except httpx.TransportError:
        raise Refusal(503) from None
    told = [(k.lower(), v) for k, v in response.headers.raw if k.lower() not in HOP and k.lower() != b"content-length"]
    return response.status_code, told, content


def serve(address: tuple[str, int], superlink: str, *, certificate: Path, key: Path, authority: Path) -> None:
    """Listen on an address with TLS, for a SuperLink at host:port, until the process is ended."""
    for file in (certificate, key, authority):
        if not file.is_file():
            raise InputError(f"{file} is missing; secure.sh makes the certificates")
    trusted = ssl.create_default_context(cafile=str(authority))
    client = httpx.AsyncClient(base_url=f"https://{superlink}", verify=trusted, timeout=PATIENCE, trust_env=False)
    host, port = address
    uvicorn.run(
        gate(client), host=host, port=port, ssl_certfile=str(certificate), ssl_keyfile=str(key),
        lifespan="off", access_log=False, server_header=False, log_level="warning",
    )  # fmt: skip
