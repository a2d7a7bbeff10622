"""Initial state of a run from checkpoints and Hugging Face folders."""
