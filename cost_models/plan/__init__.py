"""Plans and workloads: the decisions and the job."""
