"""What noise costs, and where it comes from: accounts of differential privacy, and the system's randomness."""
