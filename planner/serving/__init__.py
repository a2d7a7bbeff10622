"""Serving (``fit --inference``): memory, time, layouts of replicas and ways out."""
