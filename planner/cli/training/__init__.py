"""Commands that train, or read runs: run, launch, compare, learn, validate and others."""
