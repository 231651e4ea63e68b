"""Refusals in OpenAI's form, and checks of host, key and body before a request is parsed."""

import hmac
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from torchtitan.models.dit_tts.errors import InputError


class Refusal(HTTPException):
    """An HTTP answer other than what was asked for.

    Args:
        message: a sentence for people.
        code: the reason, for programs.
        param: the wrong field.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status, message, headers)
        self.code, self.param = code, param

    @property
    def content(self) -> dict[str, Any]:
        """The answer in the form that OpenAI's clients read."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.content, self.status_code, self.headers)


def refusal_of(error: Exception) -> Refusal:
    """Return the refusal that tells a client of an error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, InputError):
        return Refusal(400, str(error), "invalid_request")
    return Refusal(500, "the server has failed; its log says why", "internal_error")


def refusal_of_form(found: Mapping[str, Any], inside: int = 0) -> Refusal:
    """Return the refusal that tells a client of the first of pydantic's errors. `inside`: parts of its place that name no field."""
    name = ".".join(str(part) for part in found["loc"][inside:])
    if not name or found["type"] == "json_invalid":  # FastAPI's place is then a character's
        message = "the body must be a JSON object, with the header Content-Type: application/json"
        return Refusal(400, message, "invalid_request")
    return Refusal(400, f"{name}: {found['msg']}", "invalid_request", name)


def add_refusals(app: FastAPI) -> None:
    """Makes every error of an application's answers a refusal."""

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> JSONResponse:
        if not isinstance(error, Refusal):
            message = f"{request.method} {request.url.path}: {error.detail}"
            code = error.detail.lower().replace(" ", "_")
            error = Refusal(error.status_code, message, code, headers=error.headers)
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def refuse_form(request: Request, error: RequestValidationError) -> JSONResponse:
        return refusal_of_form(error.errors()[0], inside=1).response()

    @app.exception_handler(InputError)
    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return refusal_of(error).response()


# Pure ASGI: `@app.middleware("http")` would end an answer that fails midway as if it were complete.


class HostCheck:
    """Refuses requests to another name than this machine's, where the server listens for it alone (`host` is a loopback
    address). A browser sends them for a page whose name was first a stranger's server and then became 127.0.0.1. Wherever it
    listens, no page of a stranger opens a WebSocket, which a browser lets it; one of the origin `allowed` may ("*": any)."""

    def __init__(self, app: Any, host: str, allowed: str = ""):
        self.app, self.checks, self.allowed = app, _is_loopback(host), allowed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refusal = None
        if scope["type"] in ("http", "websocket"):
            headers = dict(scope["headers"])
            given, origin = (
                headers.get(key, b"").decode("latin-1") for key in (b"host", b"origin")
            )
            if self.checks and not _is_loopback(given):
                message = f"the request is to {given!r}, but this server answers those to 127.0.0.1 and localhost; "
                message += "--host 0.0.0.0 serves other machines and any name"
                refusal = Refusal(403, message, "host_not_allowed")
            own = origin.partition("://")[2] == given or self.allowed in ("*", origin)
            if not refusal and scope["type"] == "websocket" and origin and not own:
                message = f"a page of {origin!r} may not open a WebSocket here"
                refusal = Refusal(403, message, "origin_not_allowed")
        answer = refusal.response() if refusal else self.app
        await answer(scope, receive, send)


def _is_loopback(host: str) -> bool:
    """True if a name or address, with or without a port, can mean nothing but this machine."""
    try:
        name = host if host.count(":") > 1 and host[0] != "[" else urlsplit(f"//{host}").hostname
        return name == "localhost" or ip_address(name or "").is_loopback
    except ValueError:
        return False


class KeyCheck:
    """Refuses requests below /v1/ and /dev/ without the key."""

    def __init__(self, app: Any, key: str):
        self.app, self.key = app, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = self.app
        if scope["type"] != "lifespan" and scope["path"].startswith(("/v1/", "/dev/")):
            given = HTTPConnection(scope).headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self.key.encode()):
                refusal = Refusal(401, "the API key is missing or wrong", "invalid_api_key")
                answer = refusal.response()
        await answer(scope, receive, send)


class BodyLimit:
    """Refuses a request's body above `limit` bytes."""

    def __init__(self, app: Any, limit: int):
        self.app, self.limit = app, limit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        message = f"the request's body has more than the {self.limit} bytes that are allowed"
        # The client may still be sending, so the connection ends.
        refusal = Refusal(413, message, "request_too_large", headers={"Connection": "close"})
        size = 0

        async def limited() -> Any:
            nonlocal size
            received = await receive()
            size += len(received.get("body", b""))
            if size > self.limit:
                raise refusal
            return received

        await self.app(scope, limited, send)
