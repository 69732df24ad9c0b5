"""Who holds the weights and the optimiser."""
