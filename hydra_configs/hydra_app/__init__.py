"""Configurations that other Hydra applications compose: the group ``nest``."""
