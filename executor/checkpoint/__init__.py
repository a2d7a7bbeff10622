"""Checkpoints: safetensors files and a JSON index, whole or not there at all.

    step-00000100/
        weights-00000-of-00004.safetensors   the master weights that rank 0 writes
        state-00000-of-00004.safetensors     what the optimizer remembers: exp_avg/NAME, ...
        ...                                  every distinct part of a tensor is in one file only
        index.json                           which file holds which part; sizes and SHA-256 of all

Names are those of the Hugging Face state dict and every part says which ranges of the whole tensor
it is, so any layout of ranks reads what any other wrote.
"""
