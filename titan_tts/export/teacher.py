"""A run as the teacher of a distillation: it is exported into the student's run folder, with the weights that would speak."""

from titan_tts.export.options import Options
from torchtitan.models.dit_tts.config.exported import is_exported
from torchtitan.models.dit_tts.config.manager import load_config, load_run_config, run_folder_path
from torchtitan.models.dit_tts.errors import require, show
from torchtitan.models.dit_tts.files import write_atomic
from torchtitan.models.dit_tts.run.run_folder import TEACHER


def export_teacher(args: list[str]) -> list[str]:
    """The arguments of a training, whose [distill] teacher, a run's folder or a name on the hub, is now an exported
    folder of this machine."""
    config = load_config(args)
    if not config.distill.teacher:
        return args
    from titan_tts.export.exporter import export
    from titan_tts.speak.hub import find_folder

    folder, out = find_folder(config.distill.teacher), run_folder_path(config) / TEACHER
    if not is_exported(folder):
        source = out.with_suffix(".txt")
        known = source.read_text("utf-8") if source.is_file() else str(folder.resolve())
        require(
            known == str(folder.resolve()),
            f"[distill] teacher = {str(folder)!r}, but {out} was exported from {known}; give it another [job] "
            f"experiment, or that teacher",
        )
        if not is_exported(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(source, known)
            best = (folder / "validation.jsonl").is_file() and load_run_config(
                folder
            ).validation.keep_best
            options = Options(run=str(folder), out=str(out), step="best" if best else None)
            show(f"teacher: {export(options, out)}")
        folder = out
    return [*args, "--distill.teacher", str(folder)]
