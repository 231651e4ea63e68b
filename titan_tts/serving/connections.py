"""Connections of the web server, which end when idle or unread."""

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientConnection(H11Protocol):
    """Ends if no request's head comes, or an answer is not read, for `patience` seconds."""

    patience = 60.0
    _idle: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._idle, self._unread):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        if self._unread:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _await_head(self) -> None:
        if self._idle:
            self._idle.cancel()
        self._idle = self.loop.call_later(self.patience, self._end_idle)

    def _end_idle(self) -> None:
        if self._unread:  # the end of an answer is still being read
            self._await_head()
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def _await_reader(self) -> None:
        """Ends the connection if its buffer does not shrink; nothing is written to it meanwhile."""
        before = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() < before:
                self._await_reader()
            else:
                self.transport.abort()

        self._unread = self.loop.call_later(self.patience, look)


def server(app: Any, patience: float) -> uvicorn.Server:
    """A server of an application, whose idle connections end after `patience` seconds."""
    http = type("Connection", (PatientConnection,), {"patience": patience})
    return uvicorn.Server(uvicorn.Config(app, http=http, ws="none", log_level="warning"))
