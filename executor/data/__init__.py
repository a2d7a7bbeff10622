"""Training data: from files to the batches of a rank, the same on every layout of ranks."""

from executor.data.corpus import Corpus, MarkovCorpus, require_same
from executor.data.opening import open_corpus
from executor.data_options import SYNTHETIC, DataOptions

__all__ = [
    "SYNTHETIC",
    "Corpus",
    "DataOptions",
    "MarkovCorpus",
    "open_corpus",
    "require_same",
]
