"""Commands that answer with a plan: fit, plan, explain, export, report, trace and others."""
