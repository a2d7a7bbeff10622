"""Training data: from files to the batches of a rank, the same on every layout of ranks."""

from executor.data.corpus import SYNTHETIC, Corpus, MarkovCorpus, TextCorpus, open_corpus

__all__ = ["SYNTHETIC", "Corpus", "MarkovCorpus", "TextCorpus", "open_corpus"]
