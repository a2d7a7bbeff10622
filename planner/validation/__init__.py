"""``validate``: published, measured runs beside what is predicted for them.

runs_file    the columns of RUNS.csv and their values
words        what words in cells stand for, as data (words.toml)
case         one row as model, cluster, workload, plan and software profile
pricing      many cases through the formulas that ``fit`` uses
measurement  what a row measured, under its own definition
statistics   errors by source, GPU, model kind and method; rank quality
answer       what ``validate`` returns
"""
