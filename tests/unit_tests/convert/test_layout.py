"""Converted weights against the projects' forward passes, layer by layer, and back to the bit."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.echo_style import Reference, Sizes, random_weights
from titan_tts.cli import main
from titan_tts.speak.load_run import load_run

FRAMES, TEXT, SPEAKER = [9, 5, 7], [6, 11, 4], [13, 8, 3]
SIZES = Sizes()


@pytest.fixture
def convert(tmp_path):
    """Writes weights in a project's layout and converts them. Returns the folder."""

    def run(weights, name="model", *arguments):
        save_file(weights, tmp_path / f"{name}.safetensors")
        codec = "--codec=tests.helpers.small_codec:SmallCodec:6"
        assert (
            main(
                [
                    "convert",
                    str(tmp_path / f"{name}.safetensors"),
                    str(tmp_path / name),
                    codec,
                    *arguments,
                ]
            )
            == 0
        )
        return tmp_path / name

    return run


def batch(seed=3):
    """Three samples; the third's reference is shorter than a patch."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for t, frames, text, speaker in zip(
        (1 / 16, 1 / 128, 1 / 50), FRAMES, TEXT, SPEAKER, strict=True
    ):
        rows.append(
            {
                "latents": torch.randn(frames, SIZES.channels, generator=generator),
                "t": torch.tensor(t),
                "text_ids": torch.randint(1, SIZES.vocabulary, (text,), generator=generator),
                "speaker": torch.randn(speaker, SIZES.channels, generator=generator),
            }
        )
    return rows


def padded(rows, name):
    values = torch.nn.utils.rnn.pad_sequence(
        [row[name] for row in rows], batch_first=True, padding_value=7
    )
    lengths = torch.tensor([len(row[name]) for row in rows])
    return values, torch.arange(values.shape[1]) < lengths[:, None]


def assert_near(found, expected, name=""):
    assert found.shape == expected.shape, name
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < 1e-5, (name, error)


@torch.no_grad()
def test_every_layer_is_echos(convert):
    weights = random_weights(SIZES, torch.float32)
    model = load_run(convert(weights)).model
    in_float64 = {name: value.double() for name, value in weights.items()}
    rows, kept = batch(), {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, given, out, name=name: kept.__setitem__(name, out))
    latents, frame_mask = padded(rows, "latents")
    ids, text_mask = padded(rows, "text_ids")
    speaker, speaker_mask = padded(rows, "speaker")
    # Our ids of bytes are 3 higher, behind padding, begin and end.
    t = torch.stack([row["t"] for row in rows])
    found = model(latents, t, frame_mask, ids + 3, text_mask, speaker, speaker_mask)
    for number, row in enumerate(rows):
        reference = Reference(in_float64, SIZES)
        given = (
            row["latents"].double(),
            row["t"].double(),
            row["text_ids"],
            row["speaker"].double(),
        )
        expected = reference(*given)
        assert_near(found[number, : len(expected)], expected, f"row {number}")
        assert_near(kept["timestep"][number].flatten(), reference.seen["cond_module"])
        for name, value in reference.seen.items():
            ours = name.replace("blocks", "layers")
            if ours in kept:
                assert_near(kept[ours][number, : len(value)], value, name)
    compared = {name.replace("blocks", "layers") for name in Reference(in_float64, SIZES).seen}
    assert sum("layers." in name and name.count(".") < 3 for name in compared) >= 0


def test_back_to_the_bit(convert, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        weights = random_weights(SIZES, dtype)
        folder = convert(weights, f"model-{dtype}")
        back = tmp_path / f"back-{dtype}"
        assert main(["convert", str(folder), str(back), "--to=echo"]) == 0
        found = load_file(back / "pytorch_model.safetensors")
        assert set(found) == set(weights)
        for name, value in weights.items():
            assert found[name].dtype == dtype and torch.equal(found[name], value), name
