"""The web server's answers: OpenAI's speech API, the list of models, and its health."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from titan_tts.serving.batcher import Batcher, Closed, QueueFull
from titan_tts.serving.refusals import BodyCheck, KeyCheck, Refusal
from titan_tts.speak.joining import faded, pause
from titan_tts.speak.long_text import clean_text
from titan_tts.speak.sampling_options import check_text
from titan_tts.speak.synthesizer import Synthesizer
from titan_tts.speak.utterance import Speech, Utterance, Voice
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.speech.sampling.sound_files import (
    MEDIA_TYPES,
    encoded,
    pcm,
    wav_header,
)

OPENAI_MODELS = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")
"""Names that clients send that know OpenAI's models only: they mean the model that is served."""


@dataclass
class Settings:
    """Settings of the server."""

    model: str
    """name in requests"""

    voices: dict[str, Voice] = field(default_factory=dict)
    """by name, in addition to the speakers"""

    max_characters: int = 4096
    """of a request's text"""

    api_key: str = ""
    """key that requests must have; empty: none"""

    patience: float = 60.0
    """seconds for a request's body to come"""

    @property
    def max_bytes(self) -> int:
        r"""Limit of a request's body: JSON may write a character as two \uXXXX."""
        return 2**16 + 12 * self.max_characters


class SpeechBody(BaseModel):
    """Fields that OpenAI's clients send. Other fields are ignored."""

    model: str
    input: str
    voice: str | None = None
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm"] = "mp3"
    speed: float = Field(1.0, ge=0.25, le=4.0)
    stream_format: Literal["audio"] = "audio"
    instructions: str | None = None


class SpeechService:
    """Turns requests into utterances, and their speech into bytes."""

    def __init__(self, synthesizer: Synthesizer, batcher: Batcher, settings: Settings):
        self.synthesizer, self.batcher, self.settings = synthesizer, batcher, settings
        self.voices = dict(settings.voices)
        self.names = sorted({*synthesizer.speakers, *self.voices})

    def utterances(self, body: SpeechBody) -> list[Utterance]:
        """The pieces of a request's text. Raises Refusal if the model cannot say it."""
        limit = self.settings.max_characters
        if body.model not in (self.settings.model, *OPENAI_MODELS):
            message = f"there is no model {body.model!r}; this server has {self.settings.model!r}"
            raise Refusal(404, message, "model_not_found", "model")
        if body.instructions:
            message = (
                "this model speaks as its voice does and follows no instructions; leave them out"
            )
            raise Refusal(400, message, "instructions_not_supported", "instructions")
        if not body.input.strip():
            raise Refusal(400, "input is empty; give a text", "empty_input", "input")
        if len(body.input) > limit:
            message = f"input has {len(body.input)} characters, but at most {limit} are allowed"
            raise Refusal(400, message, "input_too_long", "input")
        if body.voice and body.voice not in self.names:
            message = (
                f"there is no voice {body.voice!r}; there are: {', '.join(self.names) or 'none'}"
            )
            raise Refusal(400, message, "voice_not_found", "voice")
        try:
            text = clean_text(body.input)
            check_text(text, self.synthesizer.run.tokenizer, "input")
            voice = self._voice(body.voice)
            conditions = self.synthesizer.conditions(voice)
            whole = Utterance(text, voice, conditions, speed=body.speed)
            return self.synthesizer.pieces(
                whole, low_latency=self.synthesizer.streams(body.response_format)
            )
        except InputError as error:
            raise Refusal(400, str(error), "cannot_be_said", "input") from None

    def _voice(self, name: str | None) -> Voice:
        if not name:
            return Voice()
        if name not in self.voices:
            self.voices[name] = self.synthesizer.speaker(name)
        return self.voices[name]

    async def spoken(self, pieces: list[Utterance], client: str) -> AsyncIterator[torch.Tensor]:
        """Waveforms in order: the first piece is synthesized alone, the rest in batches."""
        rate, pending = self.synthesizer.sample_rate, list[Future[Speech]]()
        with self.batcher.admitted(client, len(pieces)):
            try:
                pending = self.batcher.submit(pieces[:1], client)
                sound = (await asyncio.wrap_future(pending[0])).waveform
                yield sound if len(pieces) == 1 else faded(sound, rate)
                pending = self.batcher.submit(pieces[1:], client)
                for future in pending:
                    sound = (await asyncio.wrap_future(future)).waveform
                    yield torch.cat([pause(rate), faded(sound, rate)])
            finally:
                for future in pending:  # the client may have gone
                    future.cancel()

    async def answer(self, body: SpeechBody, request: Request) -> Response:
        """The response to a request for speech."""
        pieces, kind = await asyncio.to_thread(self.utterances, body), body.response_format
        client = request.client.host if request.client else ""
        rate, sounds = self.synthesizer.sample_rate, self.spoken(pieces, client)
        streams = self.synthesizer.streams(kind)

        async def begun() -> torch.Tensor:
            """The sound up to which an error still has a status: the first piece of a stream, else all."""
            if streams:
                return await anext(sounds)
            return torch.cat([each async for each in sounds])

        try:
            sound = await _unless_gone(request, begun())
        except QueueFull as error:
            raise Refusal(429, str(error), "queue_full", headers={"Retry-After": "1"}) from None
        except Closed as error:
            raise Refusal(503, str(error), "ending") from None
        except InputError as error:
            raise Refusal(400, str(error), "cannot_be_said", "input") from None
        if not streams:
            content = await asyncio.to_thread(encoded, sound, rate, kind)
            return Response(content, media_type=MEDIA_TYPES[kind])

        async def stream() -> AsyncIterator[bytes]:
            if kind == "wav":
                yield wav_header(self.synthesizer.samples(pieces), rate)
            yield pcm(sound)
            async for each in sounds:
                yield pcm(each)

        headers = {"X-Sample-Rate": str(rate)}
        return StreamingResponse(stream(), media_type=MEDIA_TYPES[kind], headers=headers)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, torch.Tensor]) -> torch.Tensor:
    """Awaits the work, and cancels it if the client disconnects."""

    async def goes() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, going = asyncio.create_task(work), asyncio.create_task(goes())
    try:
        await asyncio.wait((working, going), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refusal(499, "the client disconnected", "client_gone")  # nobody reads it
        if working.cancelled():  # the batcher has ended
            raise Closed("the server is shutting down")
        return working.result()
    finally:
        working.cancel()
        going.cancel()


def build_app(synthesizer: Synthesizer, batcher: Batcher, settings: Settings) -> FastAPI:
    """The application. The caller closes the batcher."""
    service = SpeechService(synthesizer, batcher, settings)
    app = FastAPI(title="titan-tts", docs_url=None, redoc_url=None)
    app.add_middleware(BodyCheck, limit=settings.max_bytes, seconds=settings.patience)
    if settings.api_key:  # checked before a body is read
        app.add_middleware(KeyCheck, key=settings.api_key)

    @app.exception_handler(Refusal)
    async def refuse(request: Request, refusal: Refusal) -> JSONResponse:
        return refusal.response()

    @app.exception_handler(RequestValidationError)
    async def refuse_form(request: Request, error: RequestValidationError) -> JSONResponse:
        found = error.errors()[0]
        name = ".".join(str(part) for part in found["loc"][1:])
        message = f"{name or 'the body'}: {found['msg']}"
        return Refusal(400, message, "invalid_request", name or None).response()

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = error.detail.lower().replace(" ", "_")
        return Refusal(error.status_code, message, code, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return Refusal(500, "the server has failed; its log says why", "internal_error").response()

    @app.post("/v1/audio/speech")
    async def speech(body: SpeechBody, request: Request) -> Response:
        return await service.answer(body, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": settings.model, "object": "model", "created": 0, "owned_by": "titan-tts"}
        return {"object": "list", "data": [entry | {"voices": service.names}]}

    @app.get("/health")
    async def health() -> JSONResponse:
        alive = batcher.alive
        state = {"status": "ok" if alive else "failed", "waiting": batcher.waiting}
        if alive:
            return JSONResponse(state)
        failure = Refusal(503, "the last request has failed", "failed")
        return JSONResponse(state | failure.content, failure.status)

    return app
