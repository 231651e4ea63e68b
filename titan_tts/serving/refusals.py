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

    def response(self) -> JSONResponse:
        """The answer in the form that OpenAI's clients read."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, self.status_code, self.headers)


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
        found = error.errors()[0]
        name = ".".join(str(part) for part in found["loc"][1:])
        message = f"{name or 'the body'}: {found['msg']}"
        return Refusal(400, message, "invalid_request", name or None).response()

    @app.exception_handler(InputError)
    async def refuse_input(request: Request, error: InputError) -> JSONResponse:
        return Refusal(400, str(error), "invalid_request").response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return Refusal(500, "the server has failed; its log says why", "internal_error").response()


# Pure ASGI: `@app.middleware("http")` would end an answer that fails midway as if it were complete.


class HostCheck:
    """Refuses requests to another name than this machine's, where the server listens for it alone (`host` is a loopback
    address). A browser sends them for a page whose name was first a stranger's server and then became 127.0.0.1."""

    def __init__(self, app: Any, host: str):
        self.app, self.checks = app, _is_loopback(host)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = self.app
        if scope["type"] in ("http", "websocket") and self.checks:
            given = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if not _is_loopback(given):
                message = f"the request is to {given!r}, but this server answers those to 127.0.0.1 and localhost; "
                message += "--host 0.0.0.0 serves other machines and any name"
                answer = Refusal(403, message, "host_not_allowed").response()
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
        if scope["type"] == "http" and scope["path"].startswith(("/v1/", "/dev/")):
            given = Request(scope).headers.get("authorization", "").removeprefix("Bearer ")
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
