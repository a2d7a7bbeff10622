"""Records of a run: metrics, progress, run.json, TensorBoard."""
