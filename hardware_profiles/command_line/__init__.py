"""Command lines from declarations of options, which the planner and the executor share."""
