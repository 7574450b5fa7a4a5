"""A run's posterior for use elsewhere: programs, plain PyTorch files, predictions of files."""
