"""The catalogue: models, accelerators, clusters. Installs as ``nest_megatron.hydra_configs``."""
