"""How parameters are frozen: requires_grad at forward time."""
