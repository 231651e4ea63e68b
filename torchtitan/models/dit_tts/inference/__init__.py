"""From a trained model to sound, and how well it can be understood."""
