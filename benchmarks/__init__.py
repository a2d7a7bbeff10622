"""Commands that measure accuracy and speed; each prints the figures that the documents quote."""
