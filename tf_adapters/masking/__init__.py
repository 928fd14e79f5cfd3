"""How parameters are frozen: requires_grad at forward time, and the tap on a layer's output."""
