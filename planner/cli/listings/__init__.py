"""Commands that list what is known: models, hardware, software, and this machine (doctor)."""
