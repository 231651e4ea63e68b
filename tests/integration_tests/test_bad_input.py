"""A user's mistake as the commands are started: one sentence, status 2, no traceback and no run folder."""

import pytest

from tools.harness import runs
from torchtitan.models.dit_tts.errors import EXIT_INPUT_ERROR


def check(run: runs.Run, words: list[str]) -> None:
    status, output = run.wait(120), run.log.read_text()
    assert status == EXIT_INPUT_ERROR and "Traceback" not in output, output
    sentences = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(set(sentences)) == 1, output  # several ranks may print the same
    assert all(word in sentences[0] for word in words), sentences[0]
    assert not run.folder.exists()


def test_a_mistake_in_the_config_is_all_that_is_printed(tmp_path):
    """`python train.py` as a user starts it."""
    toml = tmp_path / "misspelt.toml"
    toml.write_text("[modell]\nflavor = 'debug'\n")
    run = runs.start(tmp_path, "own", ["--job.config_file", str(toml)], launcher=True)
    check(run, [str(toml), "[modell]", "model?"])
    assert len(run.log.read_text().splitlines()) == 1


@pytest.mark.slow
def test_under_the_launcher(tmp_path):
    """Every rank finds the mistake; neither torchrun nor a waiting rank that it ends prints a traceback."""
    nowhere = str(tmp_path / "nowhere")
    arguments = [*runs.TINY, "--training.local_batch_size=4", "--data.path", nowhere]
    run = runs.start(tmp_path, "launched", arguments, processes=2, launcher=True)
    check(run, ["[data] path", nowhere, "matches no .tar file"])
