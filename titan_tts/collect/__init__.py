"""Long recordings -> segments with texts and speakers, ready for `titan-tts prepare`."""
