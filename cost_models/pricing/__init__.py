"""All formulas applied to one plan or to a table of plans."""
