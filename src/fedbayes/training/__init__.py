"""A federation that trains: the task, its rounds, the run that comes out, personal models."""
