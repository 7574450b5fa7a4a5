"""Run folders: journal, checkpoints, own state of clients, sweeps."""
