"""Reports of a plan or a run: one HTML page, or a trace of the simulated and measured step."""
