"""``learn``: the switches and rates of a trainer that explain a user's short runs.

mechanisms   switches (engines, overlap, precision) and rates, with their published prior
effects      changes of predicted step time and peak memory by each mechanism
posterior    likelihood over the combinations of switches, rates as Gaussians
refinement   the most likely combinations, priced exactly
unexplained  what mechanisms leave of step times, and how far it holds for other plans
next_run     the short run that would tell most
conclusions  what the runs say about each mechanism
profile_file the software profile of the user's own
answer       the result of ``learn``
text         the result as text
"""
