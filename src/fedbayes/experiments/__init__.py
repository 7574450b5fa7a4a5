"""An experiment in a file, and the task that it describes."""
