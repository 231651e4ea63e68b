"""Refusals in OpenAI's form, and checks of key and body before a request is parsed."""

import asyncio
import hmac
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse


class Refusal(Exception):
    """An HTTP answer other than speech.

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
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})

    @property
    def content(self) -> dict[str, Any]:
        """The body that OpenAI's clients read."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.content, self.status, self.headers)


# Pure ASGI: `@app.middleware("http")` would end an answer that fails midway as if it were complete.


class KeyCheck:
    """Refuses requests below /v1/ without the key."""

    def __init__(self, app: Any, key: str):
        self.app, self.key = app, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = self.app
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            given = Request(scope).headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self.key.encode()):
                refusal = Refusal(401, "the API key is missing or wrong", "invalid_api_key")
                answer = refusal.response()
        await answer(scope, receive, send)


class BodyCheck:
    """Reads a request's body, refuses one above `limit` bytes or later than `seconds`, and hands it on whole."""

    def __init__(self, app: Any, limit: int, seconds: float):
        self.app, self.limit, self.seconds = app, limit, seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        try:
            # A client that announces too much is told before it sends it.
            self._check(int(Request(scope).headers.get("content-length", 0)))
            body = await asyncio.wait_for(self._body(receive), self.seconds)
        except TimeoutError:
            message = f"the request's body has not come within {self.seconds:g} s"
            return await _last(Refusal(408, message, "request_timeout"))(scope, receive, send)
        except Refusal as refusal:
            return await _last(refusal)(scope, receive, send)
        if body is None:
            return None
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            return messages.pop() if messages else await receive()

        return await self.app(scope, replay, send)

    def _check(self, size: int) -> None:
        if size > self.limit:
            message = f"the request's body has more than the {self.limit} bytes that are allowed"
            raise Refusal(413, message, "request_too_large")

    async def _body(self, receive: Any) -> bytes | None:
        """The body; None if the client disconnected."""
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            self._check(len(body))
            more = message.get("more_body", False)
        return bytes(body)


def _last(refusal: Refusal) -> JSONResponse:
    """The refusal as the last answer of its connection, on which the client may still be sending."""
    refusal.headers["Connection"] = "close"
    return refusal.response()
