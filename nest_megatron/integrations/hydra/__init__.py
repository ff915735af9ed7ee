"""Any Hydra application: ``+nest=auto`` composes, and ``${nest:NAME}`` is a value of the plan."""
