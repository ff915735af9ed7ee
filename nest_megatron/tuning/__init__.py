"""Short runs of a job's few plans that could be the fastest, and the plan chosen after them."""

#: What can start runs; ``auto`` takes what fits the command and where this process runs.
LAUNCHERS = ("auto", "local", "srun", "submitit", "nemo_run")
