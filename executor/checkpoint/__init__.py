"""Checkpoints: safetensors files and a JSON index, published atomically.

    step-00000100/
        weights-00000-of-00004.safetensors   master weights written by rank 0
        state-00000-of-00004.safetensors     optimizer state: exp_avg/NAME, ...
        ...                                  every distinct part of a tensor is in one file only
        index.json                           file of every part; sizes and SHA-256 of all files

Names are those of the Hugging Face state dict, and every part records its ranges of the whole
tensor, so that any layout of ranks reads what any other wrote. ``format`` defines the files,
``saving`` writes them, ``loading`` reads them and Hugging Face folders, ``export`` converts them.
"""
