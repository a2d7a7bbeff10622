"""Training data.

Reads files and returns the batches of a rank, equal under every parallel layout.
"""

from executor.config.data_options import SYNTHETIC, DataOptions
from executor.data.corpus import Corpus, MarkovCorpus, require_same
from executor.data.opening import open_corpus

__all__ = ["SYNTHETIC", "Corpus", "DataOptions", "MarkovCorpus", "open_corpus", "require_same"]
