"""What a run knows and does not know: scores with errors, unfamiliar inputs, calibration."""
