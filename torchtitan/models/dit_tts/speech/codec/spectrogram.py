"""Short-time Fourier transform, mel bank, mel inversion and phase, in plain torch on the CPU.

The steps of a vocoder without weights: `stft` -> magnitudes -> `mel_filters` on the way in;
`invert_mel` -> `integrate_phase` -> `griffin_lim` on the way out. Frames are rows: a spectrogram
is (frames, bins). Frame i covers the samples [i*hop - (window - hop)/2, i*hop + (window + hop)/2),
so a waveform of n*hop samples has exactly n frames and both edges are treated alike.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

# Of mel_dct, whose log-mel frames the vocoder reads and whose STFT frames it writes.
SAMPLE_RATE, WINDOW_LENGTH, HOP, MEL_BANDS = 16_000, 640, 160, 80  # Hz, samples, samples


def hann_window(length: int) -> Tensor:
    """Periodic Hann window (length,), float32."""
    return torch.hann_window(length, periodic=True, dtype=torch.float64).float()


def stft(waveform: Tensor, window: Tensor, hop: int) -> Tensor:
    """Spectrum (..., frames, window//2 + 1) complex64 of waveforms (..., frames*hop), zeros outside them."""
    length = window.numel()
    edge = (length - hop) // 2
    frames = pad(waveform, (edge, length - hop - edge)).unfold(-1, length, hop)
    return torch.fft.rfft(frames * window)


def istft(spectrum: Tensor, window: Tensor, hop: int) -> Tensor:
    """Waveforms (..., frames*hop) whose STFT is nearest to `spectrum` (..., frames, bins) in least squares.

    Griffin and Lim 1984: windowed overlap-add over the sum of squared windows. `hop` divides the
    window's length, so the overlap-add is length/hop shifted sums and needs no scatter.
    """
    *rows, frames, _ = spectrum.shape
    length = window.numel()
    shifts = length // hop
    pieces = (torch.fft.irfft(spectrum, n=length) * window).unflatten(-1, (shifts, hop))
    weights = (window**2).view(shifts, hop)
    out = spectrum.real.new_zeros(*rows, frames + shifts - 1, hop)
    norm = out.new_zeros(frames + shifts - 1, hop)
    for shift in range(shifts):
        out[..., shift : shift + frames, :] += pieces[..., shift, :]
        norm[shift : shift + frames] += weights[shift]
    edge = (length - hop) // 2
    return (out / norm.clamp_min(1e-3)).flatten(-2)[..., edge : edge + frames * hop]


def mel_filters(bands: int, bins: int, sample_rate: int) -> Tensor:
    """Triangular mel filters (bands, bins) of unit height, from 0 Hz to half the sample rate.

    The mel scale of Slaney's Auditory Toolbox: linear to 1 kHz, logarithmic above.
    """
    step = math.log(6.4) / 27

    def to_hertz(mel: Tensor) -> Tensor:
        return torch.where(mel < 15, mel * 200 / 3, 1000 * torch.exp(step * (mel - 15)))

    top = 15 + math.log(sample_rate / 2 / 1000) / step
    edges = to_hertz(torch.linspace(0, top, bands + 2, dtype=torch.float64))
    hertz = torch.linspace(0, sample_rate / 2, bins, dtype=torch.float64)
    lower, centre, upper = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising = (hertz - lower) / (centre - lower)
    falling = (upper - hertz) / (upper - centre)
    return torch.minimum(rising, falling).clamp_min(0).float()


def invert_mel(mel: Tensor, filters: Tensor, iterations: int) -> Tensor:
    """Non-negative spectrum (frames, bins) whose mel bands come near `mel` (frames, bands).

    Richardson-Lucy steps (Lee and Seung 2001, the Kullback-Leibler update) from a flat start: each
    multiplies by the ratio of wanted to present band energy, spread over the bins of the band.
    Small and large bands are corrected at the same relative speed, which suits logarithmic targets,
    and few iterations keep the spectrum smooth.
    """
    fraction = filters / filters.sum(0).clamp_min(1e-6)
    weight = filters.sum(0).clamp_min(1e-6)
    spectrum = (mel / filters.sum(1)) @ fraction
    for _ in range(iterations):
        ratio = mel / (spectrum @ filters.T).clamp_min(1e-10)
        spectrum = spectrum * ((ratio @ filters) / weight)
    return spectrum


def integrate_phase(magnitudes: Tensor, window_length: int, hop: int) -> Tensor:
    """Phase (frames, bins) in radians, estimated from the magnitudes alone, frame by frame.

    For a Gaussian window the phase's two derivatives are the derivatives of the log magnitude
    (Portnoff 1979; Prusa, Balazs, Sondergaard 2017, "PGHI"). PGHI integrates them along a heap in
    order of magnitude. Here each frame does it in one vector step: the local peaks over frequency
    carry their phase on from the frame before, and every other bin takes the phase of the peak it
    belongs to plus the integral over frequency in between.
    """
    gamma = 0.25645 * window_length**2  # the Gaussian nearest to a Hann window, in samples^2
    frames, bins = magnitudes.shape
    fft_length = 2 * (bins - 1)
    log = magnitudes.double().clamp_min(1e-10).log()
    over_bins = torch.gradient(log, dim=1)[0]
    over_frames = torch.gradient(log, dim=0)[0] if frames > 1 else torch.zeros_like(log)
    bin_index = torch.arange(bins, dtype=torch.float64)
    advance = hop * fft_length / gamma * over_bins + 2 * math.pi * hop / fft_length * bin_index
    slope = -gamma / (hop * fft_length) * over_frames
    along = torch.cumsum(pad((slope[:, 1:] + slope[:, :-1]) / 2, (1, 0)), dim=1)

    # Every bin walks uphill to its peak: pointers to the best neighbour, doubled until they stay.
    padded = pad(log, (1, 1), value=-math.inf)
    neighbours = torch.stack([padded[:, 1:-1], padded[:, :-2], padded[:, 2:]])
    step = torch.tensor([0, -1, 1])[neighbours.argmax(0)]
    peak = torch.arange(bins).expand(frames, bins) + step
    for _ in range(math.ceil(math.log2(bins))):
        peak = peak.gather(1, peak)

    offset = along - along.gather(1, peak)
    phase = torch.empty_like(log)
    phase[0] = offset[0]
    for frame in range(1, frames):
        carried = phase[frame - 1] + (advance[frame - 1] + advance[frame]) / 2
        phase[frame] = carried[peak[frame]] + offset[frame]
    # The formulas count time from the window's centre, `stft` from its start.
    return phase - math.pi * window_length / fft_length * bin_index


def griffin_lim(
    magnitudes: Tensor,
    phase: Tensor,
    window: Tensor,
    hop: int,
    iterations: int,
    momentum: float = 0.99,
) -> Tensor:
    """Waveform (frames*hop,) with these STFT magnitudes (frames, bins), from a starting phase.

    Fast Griffin-Lim (Perraudin, Balazs, Sondergaard 2013).
    """
    spectrum = torch.polar(magnitudes, phase.to(magnitudes.dtype))
    previous = spectrum
    for _ in range(iterations):
        projected = stft(istft(spectrum, window, hop), window, hop)
        accelerated = projected + momentum * (projected - previous)
        previous = projected
        spectrum = accelerated * (magnitudes / accelerated.abs().clamp_min(1e-10))
    return istft(spectrum, window, hop)
