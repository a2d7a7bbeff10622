"""What the machine is: data with a source for each figure."""
