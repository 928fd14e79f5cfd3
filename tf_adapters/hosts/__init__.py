"""Parts that every host adapter is built from."""
