"""Changes of a file that a user wrote: single values of its text, everything else as it is.

An editor of a syntax yields texts in which one value may have changed. The first one that parses as
the old document with that one change is taken, so that an editor may guess.
"""
