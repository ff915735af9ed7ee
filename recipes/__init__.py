"""Ready jobs to start from; installs as ``nest_megatron.recipes``."""
