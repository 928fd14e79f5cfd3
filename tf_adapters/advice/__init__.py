"""What a run that was measured should change: which lever brings what, and where the layers had better be cut."""
