"""``validate``: compares predictions with published, measured runs.

runs_file    the columns of RUNS.csv and their values
vocabulary   phrases in cells as terms (vocabulary.toml)
words        settings that terms stand for (words.toml)
trainer      software profile of a row's trainer (trainer_of_row), like cluster, model, workload
case         one row as model, cluster, workload, plan and software profile
pricing      many cases through the formulas that ``fit`` uses
measurement  measured step time and peak memory of a row, under its own definition
statistics   errors by source, GPU, model kind and method; rank quality
answer       the result of ``validate``
"""
