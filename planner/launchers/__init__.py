"""Job files that start the executor on a cluster's scheduler; one module a system."""
