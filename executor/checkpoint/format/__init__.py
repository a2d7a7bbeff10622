"""Files of a checkpoint: names, index, tensor files and tensor pieces."""
