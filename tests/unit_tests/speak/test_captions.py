"""A model with captions, from training to speech; and who refuses a caption without such a model."""

import asyncio
import json
from dataclasses import replace

import pytest
import torch

from tests.helpers.exported_run import export
from tests.helpers.sampled_run import Echo
from tests.helpers.sentences import refused
from tests.helpers.tiny_runs import Folder
from titan_tts.speak.lengths import open_lengths
from titan_tts.speak.load_run import load_run
from titan_tts.speak.speech_data import open_speech_data
from titan_tts.speak.synthesizer import Synthesizer
from titan_tts.speak.utterance import Utterance, Voice

CAPTIONS = ["--data.max_caption_tokens=12", "--objective.speaker_dropout=0.5"]
WORDS = ["one two", "three"]


@pytest.fixture
def trained(train, tmp_path, tiny_data):
    """Two steps with a validation, of a voice and of a predictor of lengths."""
    validation = [f"--validation.path={tiny_data}", "--validation.samples=9"]
    assert train("run", *CAPTIONS, *validation, "--training.steps=2") == 0
    of_lengths = ["--model.flavor=duration", "--objective.text_dropout=0"]
    of_lengths += ["--activation_checkpoint.mode=none", "--training.steps=1"]
    assert train("duration", *CAPTIONS, *of_lengths) == 0
    return tmp_path / "run"


def speaker(folder, lengths="fit") -> Synthesizer:
    """Its output, which begins at zero, made random; the rest is as loaded. `lengths`: as --duration."""
    run = load_run(folder)
    with torch.no_grad():
        run.model.output.weight.normal_(generator=torch.Generator().manual_seed(0))
    speech_data = open_speech_data(run.folder, run.config)
    found = open_lengths(lengths, 1.0, run, lambda: speech_data.durations)
    sampling = replace(run.config.sampling, steps=2, text_scale=0.0)
    return Synthesizer(run, Echo(), speech_data, sampling, lambda: found, run.config.data.path)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_from_training_to_speech(trained, tmp_path, capsys):
    row = Folder(trained).validation()[-1]
    assert row["caption_gain"] is not None and row["caption_gain_at_0.9"] is not None
    folder = export(trained, tmp_path / "out")
    assert "| captions | the voice in up to 12 tokens: `--caption` |" in (
        (folder / "README.md").read_text()
    )
    synthesizer, rows = speaker(folder), []
    synthesizer.run.model.layers[0].register_forward_pre_hook(
        lambda layer, given: rows.append(given[0].shape[:2].numel())
    )

    def say(caption, texts=WORDS, **more):
        rows.clear()
        spoken = synthesizer.synthesize(texts, [Voice()], caption=caption, **more)
        return [each.latents for each in spoken], sum(rows)

    (plain, passes), (calm, of_calm), (wild, _) = map(say, ("", "calm", " wild\n"))
    assert passes == of_calm == 2 * sum(map(len, plain))
    for without, one, other in zip(plain, calm, wild, strict=True):
        assert (without - one).abs().max() > 1e-3 and (one - other).abs().max() > 1e-3
    torch.testing.assert_close(say(["wild", "calm"])[0], [wild[0], calm[1]], atol=1e-5, rtol=0)
    # The predictor of lengths hears it, too.
    texts = [Utterance("one", conditions={"caption": each}) for each in ("", "calm", "wild")]
    lengths = speaker(folder, "").lengths.estimate(texts)
    assert len({round(each, 4) for each in lengths}) == 3
    # Guidance takes another pass where a caption is given, and changes the speech of texts that have one.
    guided = {"sampling": replace(synthesizer.sampling, caption_scale=4.0, min_t=0.0)}
    (found, of_plain), (also, of_both) = say("", **guided), say(["", "calm"], **guided)
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=0)
    assert of_plain == passes and of_both == 2 * (2 * sum(map(len, also)))
    torch.testing.assert_close(also[0], plain[0], atol=1e-4, rtol=0)
    assert (also[1] - calm[1]).abs().max() > 1e-3
    refused(lambda: say("thirteen byte"), "13 tokens", "at most 12")
    refused(lambda: say("\ud800"), "surrogate")
    refused(lambda: say(["a", "b", "c"]), "2 texts with 3 captions")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_voice_learns_captions(train, tmp_path, capsys):
    """From a checkpoint and from an exported folder of a model without: only the encoder is new. A resume does not."""
    assert train("plain", "--training.steps=2") == 0
    had = Folder(tmp_path / "plain").tensors(2)
    folder = export(tmp_path / "plain", tmp_path / "out", "--weights=raw")
    for name, path in (("a", tmp_path / "plain/checkpoint/step-2"), ("b", folder)):
        start = [f"--checkpoint.initial_load_path={path}", "--optimizer.lr=0"]
        assert train(name, *CAPTIONS, *start, "--training.steps=1") == 0
        found = Folder(tmp_path / name).tensors(1)
        assert all(each in had or "caption_encoder." in each for each in found)
        names = [each for each in had if not each.startswith(("ema.", "optimizer."))]
        assert len(names) > 30 and all(torch.equal(found[each], had[each]) for each in names)
        assert found["caption_encoder.embedding.weight"].std() > 0.9
    capsys.readouterr()
    assert train("plain", *CAPTIONS, "--training.steps=3") == 2
    assert "data.max_caption_tokens = 12, but " in capsys.readouterr().err


def test_a_caption_arrives_from_options_and_lists(generate, tmp_path, capsys):
    said = ["--text=one", "--out=said.wav", "--caption=a calm  woman"]
    assert generate(*said) == 2
    error = capsys.readouterr().err
    assert (
        "not trained with captions ([data] max_caption_tokens = 0)" in error
        and error.count("\n") == 1
    )
    assert not generate.asked
    generate.loaded.config.data.max_caption_tokens = 20
    assert generate(*said, "--caption-scale=2") == 0
    [([request], sampling, _)] = generate.asked
    assert request.metadata["caption"] == "a calm  woman" and sampling.caption_scale == 2
    assert len(request.reference) == 0  # a caption makes a voice of its own
    assert generate(*said, "--speaker=bob") == 0
    assert len(generate.asked[-1][0][0].reference) > 0
    rows = [{"text": "two", "caption": "wild"}, {"text": "one two"}, {"text": "one", "caption": ""}]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    many = ["--text-list=texts.jsonl", "--out=new", "--caption=old"]
    assert generate(*many) == 0
    found = {each.text: each.metadata.get("caption") for each in generate.asked[-1][0]}
    assert found == {"two": "wild", "one two": "old", "one": None}
    asked = len(generate.asked)
    assert generate(*many) == 0 and len(generate.asked) == asked  # complete
    (tmp_path / "texts.jsonl").write_text(json.dumps(rows[0] | {"caption": "mild"}))
    assert generate(*many) == 2 and "from another text" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["--out=said.wav", "--format=pcm", "list"])
def test_a_long_text_has_the_voice_that_its_caption_makes_of_its_first_piece(
    generate, tmp_path, how, capsysbinary
):
    data = generate.loaded.config.data
    data.max_caption_tokens, data.max_frames = 20, 2
    text = "One two one two. Two one one. One two."
    (tmp_path / "texts.jsonl").write_text(f'{{"text": "{text}"}}\n{{"text": "two"}}')
    said = [f"--text={text}", how] if how != "list" else ["--text-list=texts.jsonl", "--out=new"]
    said += ["--out=-"] if how == "--format=pcm" else []
    assert generate(*said, "--caption=old", "--batch-size=2") == 0
    [first, *others] = [request for requests, *_ in generate.asked for request in requests]
    assert len(generate.asked[0][0]) == 1 and len(first.reference) == 0 and len(others) >= 2
    references = [each.reference for each in others if each.text != "two"]
    assert all(len(each) for each in references)
    assert all(torch.equal(each, references[0]) for each in references)
    assert all(len(each.reference) == 0 for each in others if each.text == "two")
    generate.asked.clear()
    assert generate(*said, "--overwrite", "--batch-size=2") == 0  # without a caption as before
    assert not any(len(each.reference) for requests, *_ in generate.asked for each in requests)


def test_a_server_keeps_the_voice_that_a_caption_makes(synthesizer, monkeypatch):
    app = pytest.importorskip("titan_tts.serving.app", reason="the extra serve is not installed")
    from titan_tts.serving.batcher import Batcher

    data, asked = synthesizer.run.config.data, []
    data.max_caption_tokens, data.max_frames = 20, 2
    say = synthesizer.synthesize

    def synthesize(texts, **more):
        asked.extend(texts)
        return say(texts, **more)

    monkeypatch.setattr(synthesizer, "synthesize", synthesize)
    batcher = Batcher(synthesizer)
    service = app.SpeechService(synthesizer, batcher, "tiny", {}, 100)
    text = "One two one two. Two one one. One two."
    body = app.SpeechBody(model="tiny", input=text, instructions="old", response_format="pcm")
    pieces = service.utterances(body)

    async def streamed(in_blocks):
        return [each async for each in service.sounds(pieces, in_blocks)]

    for in_blocks in (None, False, True):
        asked.clear()
        asyncio.run(service.all_said(pieces) if in_blocks is None else streamed(in_blocks))
        voices = [each.voice.reference for each in asked if each.text != pieces[0].text]
        assert len(voices) == len(pieces) - 1 > 1 and all(len(each) for each in voices)
        assert all(torch.equal(each, voices[0]) for each in voices)
        assert asked[0].voice.reference is None
    batcher.close()


def test_instructions_are_the_caption(synthesizer):
    app = pytest.importorskip("titan_tts.serving.app", reason="the extra serve is not installed")
    service = app.SpeechService(synthesizer, None, "tiny", {}, 100)

    def asked(**more):
        body = {"model": "tiny", "input": "one two", "instructions": " a calm\nwoman "} | more
        return service.utterances(app.SpeechBody(**body))[0]

    synthesizer.speech_data.default_voice = "bob"
    with pytest.raises(app.Refusal, match="serve one that was trained with captions"):
        asked()
    synthesizer.run.config.data.max_caption_tokens = 20
    assert asked().conditions["caption"].split() == ["a", "calm", "woman"]
    assert asked().voice == Voice() and asked(voice="ann").voice.speaker == "ann"
    assert asked(instructions=" ").voice.speaker == "bob"
    refused(lambda: asked(instructions="a" * 21), "21 tokens", "at most 20")
