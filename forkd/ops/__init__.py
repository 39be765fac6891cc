"""One verb per module. Verbs know contracts, stores and the runtime; never HTTP, never a plugin by name."""
