"""Rows of RUNS.csv as cases: a row's words become settings of a plan and of its trainer.

runs_file   the columns of RUNS.csv and their values
vocabulary  phrases in cells as terms (vocabulary.toml)
words       settings that terms stand for (words.toml)
trainer     software profile of a row's trainer, like cluster, model, workload
implied     cells that other cells imply
plan        ranks, batch, schedule, sharding and offload; recompute
case        one row as model, cluster, workload, plan and software profile
"""
