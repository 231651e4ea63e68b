"""Converted weights against the projects' speech, and back to the bit."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.helpers.echo_style import Reference, Sizes, random_weights
from tests.helpers.pretrained_checkpoints import gemma_tokenizer
from titan_tts.cli import main
from titan_tts.speak.load_run import load_run
from torchtitan.models.dit_tts.flow.counter_rng import normal, stream_keys
from torchtitan.models.dit_tts.speech.sampling.sampler import (
    SAMPLING_STREAM,
    SpeechRequest,
    generate_latents,
)
from torchtitan.models.dit_tts.text.durations import stored_durations

ECHO = Sizes()
IRODORI = replace(ECHO, vocabulary=700, patch=2, channels=8)
DESIGN = replace(IRODORI, captions=True, patch=1)  # Irodori-TTS's VoiceDesign
FILES = {"echo": "pytorch_model.safetensors", "irodori": "model.safetensors"}
PROJECTS = pytest.mark.parametrize(
    "project, sizes", [("echo", ECHO), ("irodori", IRODORI), ("irodori", DESIGN)]
)
HEADER = {"latent_patch_size": 1, "norm_eps": 1e-5, "text_tokenizer_repo": "some/tokenizer"}
HEADER |= {"max_text_len": 200, "fixed_target_latent_steps": 300}
CAPTIONS = {"use_caption_condition": True, "max_caption_len": 30, "caption_add_bos": True}
SILENT = "ignore:torch.distributed"


@pytest.fixture
def convert(tmp_path):
    """Writes weights in a project's layout and converts them. Returns the folder."""
    gemma_tokenizer().save_pretrained(tmp_path / "tokenizer")

    def run(weights, project="echo", name="model", **header):
        header |= CAPTIONS if "caption_norm.weight" in weights else {}
        metadata = {"config_json": json.dumps(HEADER | header)} if project == "irodori" else None
        source = tmp_path / name / FILES[project]
        source.parent.mkdir()
        save_file(weights, source, metadata)
        channels = weights["in_proj.weight"].shape[1]
        arguments = [f"--codec=tests.helpers.small_codec:SmallCodec:{channels}"]
        arguments += [f"--tokenizer={tmp_path / 'tokenizer'}"] if project == "irodori" else []
        out = tmp_path / f"{name}-converted"
        assert main(["convert", str(source.parent), str(out), *arguments]) == 0
        return out

    return run


def assert_near(found, expected, name, tolerance):
    assert found.shape == expected.shape, name
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < tolerance, (name, error)


@pytest.mark.parametrize(
    "project, sizes, patch",
    [("echo", ECHO, 4), ("irodori", IRODORI, 1), ("irodori", IRODORI, 2), ("irodori", DESIGN, 1)],
)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-7)])
@torch.no_grad()
@pytest.mark.filterwarnings(SILENT)
def test_it_speaks_as_the_projects_do(
    convert, monkeypatch, dtype, tolerance, project, sizes, patch
):
    """Guided by Euler's method with references of 9, 6, 1 and 0 frames, or with captions: each request alone, and all in
    one batch. In float32 up to 1e-5 is rounding, which angles of times and guidance multiply; in float64 what the division
    of a weight leaves is."""
    sizes = replace(sizes, patch=patch)
    weights = random_weights(sizes, torch.float32)
    folder = convert(weights, project)
    run = load_run(folder)
    if dtype == torch.float64:  # also what is float32 whatever the dtype of the weights is
        run.model.double()
        monkeypatch.setattr(torch, "float32", dtype)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    # A long text is split where so many bytes take as long as the model speaks.
    seconds = stored_durations(folder).estimate("a" * 336, None) / run.config.data.frames_per_second
    assert seconds == pytest.approx({"echo": 21.0, "irodori": 16.0}[project])
    draw = torch.Generator().manual_seed(5)
    captions = ("「calm！」", "wild", "a", "")
    given = ("One", "two three", "4", "5"), (9, 5, 7, 12), (9, 6, 1, 0), captions
    requests = [
        SpeechRequest(
            text, torch.randn(reference, sizes.channels, generator=draw), frames, {"caption": words}
        )
        for text, frames, reference, words in zip(*given, strict=True)
    ]
    in_float64 = {name: value.double() for name, value in weights.items()}
    theirs = Reference(in_float64, sizes, bidirectional=project == "irodori")
    expected = []
    for request in requests:
        ids = torch.tensor(run.tokenizer.encode(request.text))
        ids = (ids - 3).clamp_min(0) if project == "echo" else ids
        voice, row = request.reference.double(), torch.tensor([request.noise_row()])
        if sizes.captions:
            plain = gemma_tokenizer()
            pieces = plain.encode(request.metadata["caption"], add_special_tokens=False)
            voice = torch.tensor([plain.bos_token_id, *pieces] if pieces else [], dtype=torch.long)
        keys = stream_keys(3, torch.tensor(0), row, SAMPLING_STREAM)
        x = normal(keys, (request.frames, sizes.channels))[0].double()
        for t in (0.999, 0.74925, 0.4995, 0.24975):
            given = x, torch.tensor(t).double()
            velocity = theirs(*given, ids, voice)
            if t > 0.5:
                lost = velocity - theirs(*given, ids[:0], voice)
                scale = 3.0 if sizes.captions else {"echo": 8.0, "irodori": 5.0}[project]
                guided = scale * (velocity - theirs(*given, ids, voice[:0]))
                velocity = velocity + 3.0 * lost + guided
            x = x - 0.24975 * velocity
        expected.append(x)

    def spoken(given):
        sampling = replace(run.config.sampling, steps=4)
        to = run.model, run.tokenizer, run.objective, given, sampling, 3, run.device
        return generate_latents(*to)

    for number, (request, wanted) in enumerate(zip(requests, expected, strict=True)):
        for found in (spoken([request])[0], spoken(requests)[number]):
            assert_near(found, wanted, f"request {number}", tolerance)


@PROJECTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_back_to_the_bit(convert, tmp_path, project, sizes, dtype):
    weights = random_weights(sizes, dtype)
    folder, back = convert(weights, project), tmp_path / "back"
    command = ["convert", str(folder), str(back), f"--to={project}"]
    assert main([*command, "--codec=mine"]) == 2 and not back.exists()
    assert main(command) == 0
    found = load_file(back / FILES[project])
    assert set(found) == set(weights)
    for name, value in weights.items():
        assert found[name].dtype == dtype and torch.equal(found[name], value), name
    if project == "irodori":
        with safe_open(back / FILES[project], framework="pt") as file:
            header = json.loads(file.metadata()["config_json"])
        assert HEADER.items() <= header.items()
        assert not sizes.captions or CAPTIONS.items() <= header.items()
        voice = "caption_mlp_ratio" if sizes.captions else "speaker_mlp_ratio"
        names = ("mlp_ratio", "text_mlp_ratio", voice)
        dims = (sizes.dim, sizes.text, sizes.speaker)
        hidden = [int(dim * header[name]) for name, dim in zip(names, dims, strict=True)]
        assert hidden == [sizes.mlp, sizes.text_mlp, sizes.speaker_mlp]


def without(name):
    return lambda weights: weights.pop(name)


def shorter(name):
    return lambda weights: weights.update({name: weights[name][:-1].contiguous()})


@pytest.mark.parametrize(
    "change, words",
    [
        (without("blocks.1.attention.wk_text.weight"), "missing: 'blocks.1.attention.wk_text.we"),
        (without("cond_module.0.weight"), "cond_module.0.weight is missing"),
        (lambda weights: weights.update(more=torch.zeros(2)), "unknown: 'more'"),
        (shorter("text_encoder.blocks.2.mlp.w3.weight"), "w3.weight (34, 40) instead of (35, 40)"),
        (shorter("blocks.0.mlp_adaln.gate_up.bias"), "gate_up.bias (23,) instead of (24,)"),
    ],
)
def test_other_tensors_are_refused_by_name(convert, capsys, change, words):
    weights = random_weights(ECHO, torch.float32)
    change(weights)
    with pytest.raises(AssertionError):
        convert(weights)
    assert words in capsys.readouterr().err


def test_tensors_of_generation_block_by_block_are_left_out(convert, capsys):
    weights = random_weights(ECHO, torch.float32)
    more = ("latent_norm.weight", "blocks.0.attention.wk_latent.weight")
    convert(weights | {name: torch.zeros(3) for name in more})
    assert "left out are 2 tensors" in capsys.readouterr().out


@pytest.mark.parametrize(
    "header, words",
    [
        (
            {"use_caption_condition": True},
            "caption_encoder.blocks.0.attention.q_norm.weight is missing",
        ),
        ({"latent_patch_size": 2}, "latent_patch_size = 2"),
        ({"text_add_bos": False}, "text_add_bos = false"),
        ({"norm_eps": "small"}, "norm_eps = 'small', but it must be of the kind of 1e-05"),
        ({"fixed_target_latent_steps": 0}, "max_frames = 0"),
        ({"use_duration_predictor": True, "use_caption_condition": True}, "a later Irodori-TTS"),
        ({"text_encoder_type": "pretrained"}, "a later Irodori-TTS"),
        ({"fixed_target_latent_steps": None}, "a later Irodori-TTS"),
        ({"duration_predictor.out_proj.weight": 1}, "a later Irodori-TTS"),
    ],
)
def test_models_that_are_refused(convert, capsys, header, words):
    """A name with a point is of a tensor."""
    weights = random_weights(IRODORI, torch.float32)
    weights |= {name: torch.zeros(2) for name in header if "." in name}
    with pytest.raises(AssertionError):
        convert(weights, "irodori", **header)
    err = capsys.readouterr().err
    assert words in err and "copy it again" not in err


def test_a_header_of_a_stranger(tmp_path, capsys):
    source = tmp_path / FILES["irodori"]
    for content in ("[" * 10**5, "[]"):
        save_file(random_weights(IRODORI, torch.float32), source, {"config_json": content})
        assert main(["convert", str(source), str(tmp_path / "out"), "--codec", "mel_dct"]) == 2
        assert "cannot be read" in capsys.readouterr().err


def test_what_cannot_be_converted_is_said(convert, tmp_path, capsys):
    odd = random_weights(replace(ECHO, dim=30, heads=5), torch.float32)
    few = random_weights(replace(IRODORI, vocabulary=20), torch.float32)
    design = random_weights(DESIGN, torch.float32)
    for weights, project, words, header in (
        (odd, "echo", "has 5 heads", {}),
        (few, "irodori", "has 20 rows", {}),
        (design, "irodori", "another tokenizer", {"caption_tokenizer_repo": "b"}),
    ):
        with pytest.raises(AssertionError):
            convert(weights, project, words, **header)
        assert words in capsys.readouterr().err
    folder = str(convert(random_weights(ECHO, torch.float32), name="good"))
    source, out = str(tmp_path / "good"), str(tmp_path / "out")
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle/model.pt").touch()
    for arguments, words in (
        ([source, out], "--codec is not given"),
        ([source, out, "--codec=mel_dct"], "128 channels"),
        ([folder, out], "give --to"),
        ([source, out, "--to=echo"], "not an exported folder"),
        ([folder, out, "--to=irodori"], "encoder.convention = 'echo'"),
        ([source, folder], "exists already"),
        ([str(tmp_path / "pickle"), out], "a pickle"),
        ([str(tmp_path / "nothing.safetensors"), out], "nothing.safetensors does not exist"),
    ):
        assert main(["convert", *arguments]) == 2
        assert words in capsys.readouterr().err, arguments


@pytest.mark.filterwarnings(SILENT)
def test_texts_are_the_projects(convert):
    """Echo-TTS: the byte 0, then bytes; Irodori-TTS: the tokenizer's begin, then its pieces."""
    echo = load_run(convert(random_weights(ECHO))).tokenizer
    text = "Hi: “you”…\nIt’s—me;"
    said = "[S1] Hi, “you\"... It's, me,"
    assert echo.encode(text) == [1, *(3 + byte for byte in said.encode())]
    assert echo.encode("(S2) a") == [1, *(3 + byte for byte in b"(S2) a")]
    tokenizer = load_run(convert(random_weights(IRODORI), "irodori", "second")).tokenizer
    theirs = gemma_tokenizer()
    for text, said in (
        ("「ａ（b）〜！？…」", "a(b)ー!?…"),
        ("（one）（two）", "(one)(two)"),
        ("one ... two.. ●①—", "one … two… ○"),
        ("「 one 」", "one"),
        (" 「one」", "「one」"),
    ):
        expected = [theirs.bos_token_id, *theirs.encode(said, add_special_tokens=False)]
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.text.counts([text]) == [len(expected)]
