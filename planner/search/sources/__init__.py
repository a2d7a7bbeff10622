"""Sources of candidates: plans that a search may rank, with lower bounds."""
