"""Grouped matmuls: the linears of all experts of a layer in one call."""
