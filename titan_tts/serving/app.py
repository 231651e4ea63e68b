"""The web server's answers: OpenAI's speech API, Kokoro-FastAPI's for words' times, the list of models, a page to try
them, and its health."""

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field, ValidationError, model_validator
from starlette.middleware.cors import CORSMiddleware

from titan_tts.report.page import STYLE
from titan_tts.serving.batcher import Batcher, ending
from titan_tts.serving.refusals import (
    BodyLimit,
    HostCheck,
    KeyCheck,
    Refusal,
    add_refusals,
    refusal_of,
    refusal_of_form,
)
from titan_tts.speak.long_text import clean_text
from titan_tts.speak.synthesizer import Synthesizer
from titan_tts.speak.utterance import Speech, Utterance, Voice, check_text, join, part
from titan_tts.speak.word_times import as_json
from torchtitan.models.dit_tts.errors import require
from torchtitan.models.dit_tts.speech.sampling.sound_files import (
    MEDIA_TYPES,
    PcmResampler,
    encoded,
    pcm,
    wav_header,
)

OPENAI_MODELS = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")
"""Names that clients send that know OpenAI's models only: they mean the model that is served."""

OPENAI_VOICES = "alloy ash ballad cedar coral echo fable marin nova onyx sage shimmer verse".split()
"""Names of its voices, of which its clients must send one: where the model has none of that name, they mean its default voice."""

OPENAI_RATE = 24_000
"""of its pcm, in Hz, which has no header: its clients play whatever comes at this rate"""

_Found = TypeVar("_Found")


class SpeechBody(BaseModel):
    """Fields that OpenAI's clients send. Other fields are ignored."""

    model: str
    input: str
    voice: str | None = None
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm"] = "mp3"
    speed: float = Field(1.0, ge=0.25, le=4.0)
    stream_format: Literal["audio"] = "audio"
    stream: bool = False
    """wav and pcm begin before the first sentence is complete"""

    instructions: str | None = None

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, given: Any) -> Any:
        """A field that is null has its default."""
        is_object = isinstance(given, dict)
        return {k: v for k, v in given.items() if v is not None} if is_object else given


@dataclass
class SpeechService:
    """Turns requests into utterances, and their speech into bytes."""

    synthesizer: Synthesizer
    batcher: Batcher
    model: str
    """name in requests"""

    voices: dict[str, Voice]
    """of --voice by name"""

    max_characters: int
    """of a request's text"""

    max_seconds: float = 1200.0
    """of a request's speech, as estimated"""

    @property
    def body_limit(self) -> int:
        """Most bytes of a request. JSON may write a character as two escapes of six bytes."""
        return 2**16 + 12 * self.max_characters

    @cached_property
    def names(self) -> list[str]:
        """Voices that a request may name."""
        return sorted({*self.synthesizer.speakers, *self.voices})

    def utterances(self, body: SpeechBody) -> list[Utterance]:
        """The pieces of a request's text. Raises Refusal or InputError if the model cannot say it."""
        self.check_model(body.model)
        caption = clean_text(body.instructions or "")
        if caption and not self.synthesizer.takes_captions:
            message = "this model follows no instructions on how to speak; leave them out, or serve one that was trained "
            message += "with captions"
            raise Refusal(400, message, "invalid_request", "instructions")
        size, most = len(body.input), self.max_characters
        require(bool(body.input.strip()), "the text is empty; give one")
        require(size <= most, f"the text has {size} characters, but at most {most} are allowed")
        text = clean_text(body.input)
        check_text(text, self.synthesizer.run.tokenizer, "the text")
        voice = Voice() if caption else self.synthesizer.default_voice
        if body.voice and (body.voice in self.names or body.voice not in OPENAI_VOICES):
            voice = self.voice(body.voice)
        conditions = self.synthesizer.conditions(voice, caption)
        whole = Utterance(text, voice, conditions, speed=body.speed)
        pieces = self.synthesizer.pieces(whole, self.synthesizer.streams(body.response_format))
        seconds = self.synthesizer.samples(pieces) / self.synthesizer.sample_rate
        takes = (
            f"the text takes about {seconds:.0f} s, but at most {self.max_seconds:g} s are allowed"
        )
        require(seconds <= self.max_seconds, f"{takes}; shorten it")
        return pieces

    def check_model(self, name: str) -> None:
        """Raises Refusal for the name of another model."""
        if name not in (self.model, self.model.removeprefix("titan_tts:"), *OPENAI_MODELS):
            message = f"there is no model {name!r}; this server has {self.model!r}"
            raise Refusal(404, message, "model_not_found", "model")

    def voice(self, name: str) -> Voice:
        """The voice that a request names."""
        if name not in self.names:
            message = f"there is no voice {name!r}; there are: {', '.join(self.names) or 'none'}"
            raise Refusal(400, message, "invalid_request", "voice")
        return self.voices.get(name) or self.synthesizer.speaker(name)

    async def all_said(self, pieces: list[Utterance]) -> list[Speech]:
        """The pieces' speech once it is complete."""
        spoken, ends = list[Speech](), [len(pieces)]
        with self.batcher.admitted(len(pieces)):
            for end in [1, *ends] if self.synthesizer.designs_voice(pieces) else ends:
                with _cancelled(self.batcher.submit(pieces[len(spoken) : end])) as futures:
                    spoken += [await asyncio.wrap_future(each) for each in futures]
                pieces = self.synthesizer.in_one_voice(pieces, spoken[0])
        return spoken

    async def sounds(
        self, pieces: list[Utterance], in_blocks: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """Samples, one after the other the sound of the text: of the first piece alone, then of two, four and so on up to a
        batch, which are synthesized together while it plays. `in_blocks`: of the first piece block by block."""
        rate, count, begin = self.synthesizer.sample_rate, len(pieces), 0
        with self.batcher.admitted(count):
            if in_blocks:
                blocks, begin = self.synthesizer.blocks(pieces), 1
                while (block := blocks.next) is not None:
                    with _cancelled(self.batcher.submit([block])) as [future]:
                        speech = await asyncio.wrap_future(future)
                        with self.batcher.read(count, 1):
                            yield pcm(blocks.add(speech))
                pieces = self.synthesizer.in_one_voice(pieces, speech)
            while begin < count:
                end = min(count, begin + min(begin + 1, self.batcher.max_batch))
                with _cancelled(self.batcher.submit(pieces[begin:end])) as futures:
                    for index, future in enumerate(futures, begin):
                        speech = await asyncio.wrap_future(future)
                        with self.batcher.read(count, end - index):
                            yield pcm(part(speech.waveform, index, count, rate))
                pieces, begin = self.synthesizer.in_one_voice(pieces, speech), end

    async def answer(self, body: SpeechBody, request: Request) -> Response:
        """The response to a request for speech. It is a stream once the first piece is there: up to then an error has a
        status."""
        pieces, kind = await asyncio.to_thread(self.utterances, body), body.response_format
        synthesizer, media_type = self.synthesizer, MEDIA_TYPES[kind]
        rate = synthesizer.sample_rate
        if not synthesizer.streams(kind):
            spoken = await _unless_gone(request, self.all_said(pieces))
            content = await asyncio.to_thread(encoded, join(spoken).waveform, rate, kind)
            return Response(content, media_type=media_type)
        sounds = self.sounds(pieces, body.stream and synthesizer.has_blocks)
        first = await _unless_gone(request, anext(sounds))

        played_at = OPENAI_RATE if kind == "pcm" else rate
        resample = PcmResampler(rate, played_at)

        async def stream() -> AsyncIterator[bytes]:
            if kind == "wav":
                yield wav_header(synthesizer.samples(pieces), rate)
            yield resample(first)
            async for each in sounds:
                yield resample(each)
            yield resample(b"", last=True)

        headers = {"X-Sample-Rate": str(played_at)}
        return StreamingResponse(stream(), media_type=media_type, headers=headers)

    async def captioned(self, body: SpeechBody, request: Request) -> Response:
        """The response to a request for speech and its words' times: one line of JSON, which those read, too, that expect
        one line for each part of a stream."""
        pieces, kind = await asyncio.to_thread(self.utterances, body), body.response_format
        spoken = await _unless_gone(request, self.all_said(pieces))
        synthesizer = self.synthesizer

        def content() -> dict[str, Any]:
            rate = synthesizer.sample_rate
            sound = encoded(join(spoken).waveform, rate, kind)
            if kind == "pcm":
                sound = PcmResampler(rate, OPENAI_RATE)(sound, last=True)
            words = synthesizer.word_times([each.text for each in pieces], spoken)
            times = [
                {"word": each["word"], "start_time": each["start"], "end_time": each["end"]}
                for each in as_json(words)
            ]
            return {
                "audio": base64.b64encode(sound).decode(),
                "audio_format": kind,
                "timestamps": times,
            }

        return JSONResponse(await asyncio.to_thread(content))

    async def converse(self, socket: WebSocket) -> None:
        """Answers the messages of a client, each a request for speech, until it goes."""
        await socket.accept()
        receiving = asyncio.ensure_future(socket.receive())
        tasks: list[asyncio.Task[Any]] = [receiving]
        try:
            while (received := await receiving)["type"] != "websocket.disconnect":
                receiving = asyncio.ensure_future(socket.receive())
                content = received.get("text") or received.get("bytes") or ""
                answering = asyncio.ensure_future(self.tell(socket, content))
                tasks = [receiving, answering]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if receiving.done() and receiving.result()["type"] == "websocket.disconnect":
                    return
                await answering
        finally:
            for task in tasks:
                task.cancel()

    async def tell(self, socket: WebSocket, content: str | bytes) -> None:
        """Sends the sound of a request: its rate, samples as they are ready, and its end; or what is wrong with it."""
        try:
            try:
                body = SpeechBody.model_validate_json(content)
            except ValidationError as error:
                raise refusal_of_form(error.errors()[0]) from None
            pcm_only = (
                body.response_format == "pcm" or "response_format" not in body.model_fields_set
            )
            require(
                pcm_only, f"response_format = {body.response_format}, but a WebSocket sends pcm"
            )
            body.response_format = "pcm"
            pieces = await asyncio.to_thread(self.utterances, body)
            await socket.send_json(
                {"type": "audio.start", "sample_rate": self.synthesizer.sample_rate}
            )
            async with aclosing(self.sounds(pieces, self.synthesizer.has_blocks)) as sounds:
                async for each in sounds:
                    await socket.send_bytes(each)
            await socket.send_json({"type": "audio.done"})
        except WebSocketDisconnect:
            return
        except Exception as error:
            refusal = refusal_of(error)
            await socket.send_json({"type": "error", **refusal.content})
            if refusal.status_code == 500:
                raise


@contextmanager
def _cancelled(futures: list[Future[Speech]]) -> Iterator[list[Future[Speech]]]:
    """The futures, which are cancelled at the end: the client may have gone."""
    try:
        yield futures
    finally:
        for future in futures:
            future.cancel()


async def _unless_gone(request: Request, work: Awaitable[_Found]) -> _Found:
    """Awaits the work, and cancels it if the client disconnects."""
    working = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([working], timeout=0.1))[0]:
            if await request.is_disconnected():
                raise Refusal(499, "the client disconnected", "client_gone")  # nobody reads it
        if working.cancelled():  # the batcher has ended
            raise ending()
        return working.result()
    finally:
        working.cancel()


def build_app(
    service: SpeechService, api_key: str = "", host: str = "127.0.0.1", origin: str = ""
) -> FastAPI:
    """The application. `api_key`: what requests must have; empty: none. `host`: where it listens. `origin`: whose pages may
    call it; "*": any. The caller closes the batcher."""
    app = FastAPI(title="titan-tts", docs_url=None, redoc_url=None)
    add_refusals(app)
    app.add_middleware(BodyLimit, limit=service.body_limit)
    if api_key:  # checked before a body is read
        app.add_middleware(KeyCheck, key=api_key)
    else:
        app.add_middleware(HostCheck, host=host, allowed=origin)
    if origin:  # last, so outermost: a browser asks without the key whether it may call
        names: Any = {"allow_headers": ["*"], "expose_headers": ["X-Sample-Rate"]}
        app.add_middleware(
            CORSMiddleware, allow_origins=[origin], allow_methods=["GET", "POST"], **names
        )

    @app.get("/")
    async def page() -> HTMLResponse:
        content = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        style = STYLE.read_text(encoding="utf-8")
        return HTMLResponse(content.replace("/* page_style */", style))

    @app.post("/v1/audio/speech")
    async def speech(body: SpeechBody, request: Request) -> Response:
        return await service.answer(body, request)

    @app.post("/dev/captioned_speech")
    async def captioned_speech(body: SpeechBody, request: Request) -> Response:
        return await service.captioned(body, request)

    @app.websocket("/v1/audio/speech/stream")
    async def speech_stream(socket: WebSocket) -> None:
        await service.converse(socket)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        entry = {"id": name, "object": "model", "created": 0, "owned_by": "titan-tts"}
        return entry | {
            "voices": service.names,
            "instructions": service.synthesizer.takes_captions,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [await model(service.model)]}

    @app.get("/v1/audio/voices")  # as Kokoro-FastAPI has it: Open WebUI and others offer these
    async def voices() -> dict[str, Any]:
        return {"voices": [{"id": name, "name": name} for name in service.names]}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        if not service.batcher.alive:
            raise Refusal(503, "the last request has failed", "failed")
        return {"status": "ok", "waiting": service.batcher.waiting}

    return app
