"""What every host adapter is built from."""
