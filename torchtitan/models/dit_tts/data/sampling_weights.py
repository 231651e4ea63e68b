"""Expected draws of each sample per epoch: mixing of datasets, balancing of classes, durations.

Within a dataset sample i, of class y with n_y samples and of duration d_i, is drawn in proportion to

    w_i  *  (1 - β) / (1 - β^n_y)  *  d_i^α

w_i is the sample's own weight, from its JSON. The second factor is one over the effective number of samples
of the class (Cui et al., "Class-Balanced Loss Based on Effective Number of Samples", CVPR 2019), which they
put on the loss; here it is on the draw. The draws of an epoch, as many as there are samples, are then divided among the datasets by their
weights.
"""

import numpy as np

from torchtitan.models.dit_tts.config.job_config import Data
from torchtitan.models.dit_tts.data.batch_sampler import WEIGHT_BITS
from torchtitan.models.dit_tts.errors import InputError


def draws_per_epoch(
    data: Data,
    source: np.ndarray,
    frames: np.ndarray,
    label_codes: np.ndarray | None = None,
    sample_weights: np.ndarray | None = None,
) -> np.ndarray | None:
    """Draws per epoch of each sample, int64 in units of 2**-WEIGHT_BITS; None where each is 1.

    Args:
        source, frames: (n,) number of the dataset, and latent frames, of each sample.
        label_codes: (n,) class of each sample, -1 for none (a class of its own); None: no balancing.
        sample_weights: (n,) positive; None: all alike.
    """
    weights, alpha, beta = data.weights, data.duration_alpha, data.balance_beta
    if not weights and label_codes is None and sample_weights is None and alpha == 0:
        return None
    total = len(source)
    draws = np.ones(total) if sample_weights is None else sample_weights.astype(np.float64)
    if alpha != 0:
        draws *= (frames / data.frames_per_second) ** alpha
    for number, name in enumerate([data.path] if isinstance(data.path, str) else data.path):
        inside = np.flatnonzero(source == number)
        if not len(inside):
            if weights:
                raise InputError(
                    f"[data] weights gives {weights[number]:g} to '{name}', of which no "
                    "sample is used; remove it or raise max_frames and max_text_tokens"
                )
            continue
        if label_codes is not None:
            _, classes, counts = np.unique(
                label_codes[inside], return_inverse=True, return_counts=True
            )
            draws[inside] *= ((1 - beta) / (1 - beta**counts))[classes]
        total_draws = float(len(inside))
        if weights:
            total_draws = total * weights[number] / sum(weights)
        draws[inside] *= total_draws / draws[inside].sum()
    # Never zero: every sample comes at some time.
    return np.maximum(np.rint(draws * (1 << WEIGHT_BITS)).astype(np.int64), 1)
