"""The intervals that predictions state, from sources left out."""
