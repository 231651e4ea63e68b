"""`titan-tts evaluate`: runs compared on texts that they were not trained on."""
