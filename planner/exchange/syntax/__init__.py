"""The syntax of other trainers' files: JSON, YAML, flags of shell scripts, Python recipes."""
