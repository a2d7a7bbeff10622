"""``validate``: compares predictions with published, measured runs.

rows         rows of RUNS.csv as model, cluster, workload, plan and software profile
pricing      many cases through the formulas that ``fit`` uses
measurement  measured step time and peak memory of a row, under its own definition
statistics   errors by source, GPU, model kind and method; rank quality
answer       the result of ``validate``
"""
