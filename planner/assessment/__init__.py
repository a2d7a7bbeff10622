"""Assessment of one plan: verdict, memory budget, host memory, largest sizes that fit."""
