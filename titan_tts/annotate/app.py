"""The annotation server's answers. All but the page itself, which holds no data, need the token of the page's address,
so that no other page in the browser and no other machine can ask."""

from pathlib import Path
from typing import Any, Literal

import torch
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel, field_validator

from titan_tts.annotate.desk import Desk, Task
from titan_tts.annotate.differences import differences
from titan_tts.annotate.segments import Segment, load_audio
from titan_tts.records.json_lines import is_utf8
from titan_tts.report.page import STYLE
from titan_tts.serving.refusals import BodyLimit, HostCheck, KeyCheck, Refusal, add_refusals
from torchtitan.models.dit_tts.speech.audio import to_mono
from torchtitan.models.dit_tts.speech.sampling.sound_files import encoded

_PAGE = Path(__file__).with_name("page.html")
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; media-src blob:; "
    "frame-ancestors 'none'"
)
_FACTS = ("agreement", "speaker", "language", "source", "quality", "snr_db")


class Judgement(BaseModel):
    segment: str
    action: Literal["accept", "reject", "skip"]
    text: str
    text_verbatim: str | None = None

    @field_validator("*")
    @classmethod
    def is_text(cls, value: str | None) -> str | None:
        if not is_utf8(value or ""):
            raise ValueError("half a surrogate pair, which is no character")
        return value


def build_app(
    target: Path, desk: Desk, settings: dict[str, Any], host: str = "127.0.0.1"
) -> FastAPI:
    """The application. `settings`: title and tokens, for the page. `host`: where it listens."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_refusals(app)
    app.add_middleware(BodyLimit, limit=2**20)
    app.add_middleware(KeyCheck, key=desk.token)
    app.add_middleware(HostCheck, host=host)

    def find(segment: str) -> Segment:
        if segment not in desk.segments:
            raise Refusal(404, f"there is no segment {segment!r}", "segment_not_found")
        return desk.segments[segment]

    def answer(task: Task | None) -> dict[str, Any]:
        shown = None
        if task is not None:
            of, begin = task.segment, task.undone or task.segment
            clean, verbatim = differences(of.text, of.text_verbatim or "")
            shown = {
                "id": of.id,
                "recognized": {"text": of.text, "text_verbatim": of.text_verbatim},
                "heard": {"text": clean, "text_verbatim": verbatim},
                "texts": {"text": begin.text, "text_verbatim": begin.text_verbatim},
                "undone": task.undone and task.undone.action,
                "facts": {name: of.labels.get(name) for name in _FACTS},
            }
        return {"segment": shown, "progress": desk.progress()}

    @app.get("/")
    def page() -> HTMLResponse:
        content = _PAGE.read_text(encoding="utf-8").replace(
            "/* page_style */", STYLE.read_text(encoding="utf-8")
        )
        return HTMLResponse(content, headers={"Content-Security-Policy": _POLICY})

    @app.get("/v1/settings")
    def get_settings() -> dict[str, Any]:
        return settings

    @app.post("/v1/next")
    def next_segment() -> dict[str, Any]:
        return answer(desk.next())

    @app.post("/v1/judge")
    def judge(body: Judgement) -> dict[str, Any]:
        desk.judge(find(body.segment).id, body.action, body.text, body.text_verbatim)
        return answer(desk.next())

    @app.post("/v1/undo")
    def undo() -> dict[str, Any]:
        return answer(desk.undo())

    @app.get("/v1/audio")
    def audio(segment: str) -> Response:
        found = load_audio(target, find(segment))
        sound = torch.from_numpy(to_mono(found.samples))
        return Response(encoded(sound, found.rate, "wav"), media_type="audio/wav")

    return app
