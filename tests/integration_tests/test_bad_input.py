"""A user's mistake ends with one sentence and a status that is not zero, never with a traceback."""

import io
import os
import sys
import tarfile

import numpy as np
import pytest
import torch

from tools.harness import forked, runs
from tools.harness.synthetic import make_shards
from torchtitan.models.dit_tts import main
from torchtitan.models.dit_tts.errors import EXIT_INPUT_ERROR


def train_each(cases: list[list[str]]) -> None:
    """Several trainings in one process, one after the other; says how each ended."""
    for number, arguments in enumerate(cases):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        status = main.train(arguments)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        sys.stdout.flush()
        print(f"case {number} ended with {status}", file=sys.stderr, flush=True)


def incomplete_tar(path) -> None:
    """Latents and text of two samples, but no speaker's reference."""
    path.parent.mkdir()
    latents = io.BytesIO()
    np.save(latents, np.ones((20, 128), np.float16))
    with tarfile.open(path, "w") as tar:
        for key in ("a1", "a2"):
            for suffix, content in (("npy", latents.getvalue()), ("json", b'{"text": "one"}')):
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def cases(folder) -> dict[str, tuple[list[str], list[str]]]:
    """Name to (arguments, what the sentence must say: key or file, found, allowed)."""
    toml = folder / "misspelt.toml"
    toml.write_text("[training]\nstepps = 5\n")
    (folder / "empty").mkdir()
    incomplete_tar(folder / "incomplete" / "000.tar")
    make_shards(folder / "narrow", 8, shards=1, channels=64)
    make_shards(folder / "good", 8, shards=1)

    def data(name):
        return ["--data.path", str(folder / name)]

    return {
        "unknown_key": (
            ["--job.config_file", str(toml)],
            [str(toml), "[training] stepps", "did you mean steps?"],
        ),
        "unknown_flavor": (
            ["--model.flavor=13B"],
            ["[model] flavor", "'13B'", "debug, 800M, 3B, 8B"],
        ),
        "wrong_value": (["--training.steps=0"], ["[training] steps = 0", "greater than 0"]),
        "degrees": (
            [*data("good"), "--parallelism.data_parallel_shard_degree=3"],
            ["data_parallel_shard_degree 3", "1 processes", "must be 1"],
        ),
        "global_batch": (
            [*data("good"), "--training.global_batch_size=12"],
            ["[training] global_batch_size = 12", "local_batch_size 8"],
        ),
        "missing_folder": (
            data("nowhere"),
            ["[data] path", str(folder / "nowhere"), "names no .tar file", "a folder of .tar"],
        ),
        "empty_folder": (
            data("empty"),
            ["[data] path", str(folder / "empty"), "names no .tar file"],
        ),
        "incomplete_triplets": (
            data("incomplete"),
            ["000.tar", "sample 'a1' is incomplete", "lacks .ref.npy", "1 more", "data doctor"],
        ),
        "latent_width": (
            data("narrow"),
            ["000000.tar", "64 wide", "latent_channels = 128", "set it to 64"],
        ),
    }


DATA_MISTAKES = ("missing_folder", "empty_folder", "incomplete_triplets", "latent_width")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Name to (exit status, output, words to say, run's folder) of every case."""
    folder = tmp_path_factory.mktemp("bad_input")
    given = cases(folder)
    arguments = [
        [*runs.TINY, "--job.dump_folder", str(folder), f"--job.experiment={name}", *more]
        for name, (more, _) in given.items()
    ]
    log = folder / "log"
    status = forked.start(train_each, arguments, log=log).wait(120)
    assert status == 0, log.read_text()
    rest, found = log.read_text(), {}
    for number, (name, (_, words)) in enumerate(given.items()):
        output, _, rest = rest.partition(f"case {number} ended with ")
        status, _, rest = rest.partition("\n")
        found[name] = (int(status), output, words, folder / name)
    return found


def check(status: int, output: str, words: list[str]) -> str:
    """The one sentence of a run that was refused."""
    assert status != 0
    assert "Traceback" not in output, output
    sentences = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(set(sentences)) == 1, output  # of ranks that both speak, the same
    for word in words:
        assert word in sentences[0], sentences[0]
    return sentences[0]


@pytest.mark.parametrize(
    "name",
    ["unknown_key", "unknown_flavor", "wrong_value", "degrees", "global_batch", *DATA_MISTAKES],
)
def test_one_sentence(outputs, name):
    status, output, words, folder = outputs[name]
    sentence = check(status, output, words)
    assert status == EXIT_INPUT_ERROR
    assert not folder.exists()
    if name not in DATA_MISTAKES:
        # Found before anything is made: the sentence is all there is.
        assert output.splitlines() == [sentence]


def test_a_process_of_its_own(tmp_path):
    """`python train.py` as a user starts it."""
    toml = tmp_path / "misspelt.toml"
    toml.write_text("[modell]\nflavor = 'debug'\n")
    run = runs.start(tmp_path, "own", ["--job.config_file", str(toml)], launcher=True)
    sentence = check(run.wait(60), run.log.read_text(), [str(toml), "[modell]", "model?"])
    assert run.log.read_text().splitlines() == [sentence]
    assert not run.folder.exists()


def test_under_the_launcher(tmp_path):
    """Every rank meets the mistake, one says it, and neither torchrun nor a rank that it ends while
    it waits adds a traceback."""
    nowhere = str(tmp_path / "nowhere")
    arguments = [*runs.TINY, "--training.local_batch_size=4", "--data.path", nowhere]
    run = runs.start(tmp_path, "launched", arguments, processes=2, launcher=True)
    status = run.wait(120)
    check(status, run.log.read_text(), ["[data] path", nowhere, "names no .tar file"])
    assert status == EXIT_INPUT_ERROR
    assert not run.folder.exists()
