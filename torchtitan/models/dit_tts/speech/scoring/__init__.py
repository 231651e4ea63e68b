"""Scores of speech: recognizers, word errors, speaker similarity, predicted opinion, intervals."""
