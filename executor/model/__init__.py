"""A pipeline stage built from Hugging Face modules."""
