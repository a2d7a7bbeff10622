"""Hardware and software profiles: figures of machines and trainers, each with its source."""
