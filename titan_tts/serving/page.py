"""The demo's page: a text, a voice and settings; playback and spectrogram."""

import os
from dataclasses import replace
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # it would report to its makers

import gradio as gr
import numpy as np

from titan_tts.report.words import counted
from titan_tts.serving.served import Served
from titan_tts.speak.utterance import Voice
from torchtitan.models.dit_tts.config.sampling_checks import check_sampling
from torchtitan.models.dit_tts.errors import InputError
from torchtitan.models.dit_tts.speech.sampling.plots import draw_spectrograms
from torchtitan.models.dit_tts.speech.sampling.sound_files import pcm

ANY = "(any)"

_BATCH = 16
"""pieces of a text per batch"""


def build_page(served: Served, name: str, seed: int) -> gr.Blocks:
    """The page, whose one function is also the API `/say`. `seed`: default seed of the noise."""
    names, synthesizer = [ANY, *served.names], served.synthesizer
    sampling, first = synthesizer.sampling, synthesizer.default_voice.speaker or names[-1]

    def say(
        text: str,
        voice: str,
        recording: str | None,
        speed: float,
        steps: float,
        text_scale: float,
        speaker_scale: float,
        seed: float,
    ) -> tuple[tuple[int, np.ndarray], Any, str]:
        try:
            chosen = synthesizer.recording(recording) if recording else voice
            pieces = served.pieces(text, Voice() if chosen == ANY else chosen, speed)
            chosen_sampling = replace(
                sampling, steps=int(steps), text_scale=text_scale, speaker_scale=speaker_scale
            )
            check_sampling(chosen_sampling)
            seed_of_noise = int(seed or 0)  # None: the field is empty
            [(_, speech)] = synthesizer.say([pieces], seed_of_noise, _BATCH, chosen_sampling)
        except InputError as error:
            raise gr.Error(str(error), print_exception=False) from None
        waveform, rate = speech.waveform, speech.sample_rate
        samples = np.frombuffer(pcm(waveform), "<i2")
        about = f"{len(waveform) / rate:.2f} s in {counted(len(pieces), 'piece')}"
        return (rate, samples), draw_spectrograms([(text[:80], waveform)], rate), about

    def slider(label: str, least: float, most: float, value: float, step: float) -> gr.Slider:
        return gr.Slider(least, most, value, step=step, label=label)

    title, hour = f"titan-tts: {name}", 3600  # older recordings and speech are deleted
    with gr.Blocks(title=title, analytics_enabled=False, delete_cache=(hour, hour)) as page:
        gr.Markdown(f"# {name}")
        with gr.Row():
            with gr.Column():
                most = served.max_characters
                text = gr.Textbox(label="Text", lines=4, max_length=most, elem_id="text")
                voice = gr.Dropdown(names, value=first, label="Voice", elem_id="voice")
                recording = gr.Audio(
                    sources=["upload", "microphone"],
                    type="filepath",
                    label="or a recording of the voice",
                )
                with gr.Accordion("Knobs", open=False):
                    knobs = [
                        slider("Speed", 0.5, 2.0, 1.0, 0.05),
                        slider("Steps", 1, 100, sampling.steps, 1),
                        slider("Guidance towards the text", 0, 10, sampling.text_scale, 0.1),
                        slider("Guidance towards the speaker", 0, 10, sampling.speaker_scale, 0.1),
                        gr.Number(seed, precision=0, minimum=0, label="Seed of the noise"),
                    ]
                button = gr.Button("Say it", variant="primary", elem_id="say")
            with gr.Column():
                sound = gr.Audio(label="Speech", format="wav", elem_id="speech")
                picture = gr.Plot(label="Spectrogram")
                about = gr.Textbox(label="Length", interactive=False, elem_id="about")
        inputs = [text, voice, recording, *knobs]
        button.click(say, inputs, [sound, picture, about], api_name="say", concurrency_limit=1)
    return page
