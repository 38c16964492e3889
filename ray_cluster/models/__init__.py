"""Names, folders, sizes and fidelity tables of models, and the built-in family."""
