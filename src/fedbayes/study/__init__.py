"""Experiments in files: the record, the run folder, the report."""
