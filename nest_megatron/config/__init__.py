"""What a user typed, from Hydra overrides to checked requests."""
