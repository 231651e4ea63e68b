"""How good speech is: recognizers, word errors, speaker similarity, predicted opinion, intervals."""
