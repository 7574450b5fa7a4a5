"""What chance allows: exact intervals of shares, and bets on ranks. NumPy alone, so that reports need no torch."""
