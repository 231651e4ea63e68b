"""What the loader asks of features that a text encoder made before."""

from typing import Protocol

import numpy as np
import torch


class Features(Protocol):
    """Features of every sample's text that are read, not computed.

    Attributes:
        width: h, of a token's feature.
        torch_dtype: of the features.
        tokens: (n,) tokens of each sample's text without its conditioning.
        encoder_fingerprint: of what made them.
    """

    width: int
    torch_dtype: torch.dtype
    tokens: np.ndarray
    encoder_fingerprint: str

    def read(self, sample: int, out: np.ndarray) -> int:
        """Fill the first rows of out (L, h), which gets their bits, and return their number.

        Raises:
            CorruptSampleError: what is stored is not what was written.
            InputError: there are more than L.
        """
        ...
