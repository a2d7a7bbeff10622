"""The assessment of one plan: verdict, budget, host memory, reach."""
